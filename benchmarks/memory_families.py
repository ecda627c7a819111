"""The memory budget of `wallfacer plan` for other models: their own layers counted, and formulas.

    python benchmarks/memory_families.py          # about 15 minutes
    python benchmarks/memory_families.py OPT Phi

As in memory_budget.py: bytes of activations for each token of one rank, from steps of two lengths
in fresh processes, on a CPU. "counted" is what `wallfacer plan --model FOLDER` prints, "formulas"
what it would print if the model could not run on fake tensors.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import partial

import torch
import transformers
from measure import attempt, cores_and_load, cpu_name, print_head, print_row
from memory_budget import ITEMSIZES, SEQLENS, SMALL, Case

from wf_backends.budget import Decoder
from wf_transformers.folders.shape import model_shape

POSITIONS = {"max_position_embeddings": SEQLENS[1]}
RATIOS = ("counted / measured", "formulas / measured")
NO_MLP = {"hidden_size": 256, "vocab_size": 256, "num_attention_heads": 4}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
FAMILIES = {
    "Llama": SMALL,
    "Qwen3": SMALL | {"head_dim": 64},
    "Olmo2": SMALL,
    "Gemma3Text": SMALL | {"head_dim": 64},
    "Phi": SMALL,
    "GPT2": NO_MLP | {"attn_pdrop": 0.0},
    "GPTNeoX": NO_MLP | {"intermediate_size": 1024},
    "OPT": NO_MLP | {"ffn_dim": 1024, "word_embed_proj_dim": 256, "dropout": 0.0},
    "Falcon": NO_MLP | {"alibi": False},
    "Mixtral": SMALL | {"num_local_experts": 8},
    "Qwen3Moe": SMALL | {"head_dim": 64} | EXPERTS,
}


def counted(case: Case) -> Decoder:
    """The case's model as `wallfacer plan --model` reads it from a folder."""
    config_class = getattr(transformers, f"{case.family}Config")
    with tempfile.TemporaryDirectory() as folder:
        sizes = dict(case.shape) | {"num_hidden_layers": case.layers}
        config_class(architectures=[f"{case.family}ForCausalLM"], **sizes).save_pretrained(folder)
        return Decoder(**model_shape(folder, ITEMSIZES[case.dtype]))


def print_family(case: Case) -> None:
    """Measure a case at both lengths, and print its row."""
    model = counted(case)
    by_formulas = replace(model, kinds=(), last_norm=None)
    short, long = (replace(case, seqlen=seqlen) for seqlen in SEQLENS)
    tokens = SEQLENS[1] - SEQLENS[0]
    measured = (long.measured() - short.measured()) / tokens
    figures, ratios = list[str](), list[str]()
    for prediction in (model, by_formulas):
        bytes_a_token = (long.predicted(prediction) - short.predicted(prediction)) / tokens
        is_missing = prediction is model and not model.kinds
        figures.append("-" if is_missing else f"{bytes_a_token:,.0f}")
        ratios.append("-" if is_missing else f"{bytes_a_token / measured:.2f}")
    print_row(case.family, case.checkpoints, *figures, f"{measured:,.0f}", *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    args = parser.parse_args()
    print(f"{versions}, {cpu_name()}, {cores_and_load()}\n")
    print_head("bfloat16", "checkpoints", "counted", "formulas", "measured", *RATIOS)
    for family in args.families:
        case = Case("bfloat16", shape=tuple((POSITIONS | FAMILIES[family]).items()), family=family)
        attempt(partial(print_family, case))
        attempt(partial(print_family, replace(case, checkpoints="device")))


if __name__ == "__main__":
    main()
