"""An Evoformer block of AlphaFold 2 under a memory budget, on one CPU.

    python examples/fold/fold_block.py
    python examples/fold/fold_block.py --residues 96 --max-memory 40MiB

`autochunk` finds which operators to run slice by slice, and in how many slices; the model itself
is not edited.
"""

from __future__ import annotations

import argparse
import time

import torch
from evoformer import EvoformerBlock

from wf_backends.autochunk import autochunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--residues", type=int, default=48)
    parser.add_argument("--sequences", type=int, default=16, help="of the alignment")
    parser.add_argument("--max-memory", default=None, help='such as "20MiB"; default: the least')
    args = parser.parse_args()

    torch.manual_seed(0)
    model = EvoformerBlock().eval()
    msa = torch.randn(1, args.sequences, args.residues, 256)
    pair = torch.randn(1, args.residues, args.residues, 128)
    start = time.perf_counter()
    chunked = autochunk(model, (msa, pair), max_memory=args.max_memory)
    print(f"planned in {time.perf_counter() - start:.1f} s")
    print(chunked.explain())
    with torch.no_grad():
        outputs = zip(chunked(msa, pair), model(msa, pair), strict=True)
    differences = torch.stack([(a - b).abs().max() for a, b in outputs])
    print(f"largest difference: {differences.max():.1g}")


if __name__ == "__main__":
    main()
