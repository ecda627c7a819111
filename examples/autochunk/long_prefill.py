"""The longest prompt that a GPT-2 takes within a budget, and that prompt's prefill, on one CPU.

    python examples/autochunk/long_prefill.py
    python examples/autochunk/long_prefill.py --max-memory 64MiB

Lengths are tried on fake tensors: nothing is computed until the longest one is found.
"""

from __future__ import annotations

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gpt2 import GPT2Config, GPT2Model

from wf_backends.autochunk import BudgetError, autochunk, longest, memory_profiles

STEP = 256  # tokens


def gpt2(tokens: int) -> tuple[GPT2Model, torch.Tensor]:
    config = GPT2Config(
        n_embd=96,
        n_layer=2,
        n_head=4,
        vocab_size=1000,
        n_positions=tokens,
        attn_implementation="eager",
    )
    return GPT2Model(config).eval(), torch.randint(1000, (1, tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--max-memory", default="8MiB", help="of activations")
    parser.add_argument("--max-slowdown", type=float, default=0.5)
    args = parser.parse_args()
    torch.manual_seed(0)

    def fits(tokens: int) -> bool:
        with FakeTensorMode():
            model, ids = gpt2(tokens)
        inputs = {"input_ids": ids, "use_cache": False}
        try:
            memory_profiles(model, inputs, args.max_memory, args.max_slowdown)
        except BudgetError:
            return False
        return True

    reach = longest(fits, STEP)
    print(f"longest prompt within {args.max_memory}: {reach} tokens")
    if not reach:
        return
    model, ids = gpt2(reach)
    inputs = {"input_ids": ids, "use_cache": False}
    chunked = autochunk(model, (), inputs, args.max_memory, args.max_slowdown)
    print(chunked.explain())
    with torch.no_grad():
        print(f"last hidden state: {tuple(chunked(**inputs).last_hidden_state.shape)}")


if __name__ == "__main__":
    main()
