"""Find the longest prompt of a GPT-2 that fits a memory budget, and prefill it, on one CPU.

    python examples/long_prefill.py
    python examples/long_prefill.py --max-memory 64MiB

The search plans each length on fake tensors; only the longest prompt is computed.
"""

from __future__ import annotations

import argparse

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gpt2 import GPT2Config, GPT2Model

from wf_backends.autochunk import BudgetError, autochunk, longest, memory_profiles

LENGTH_STEP = 256  # tokens; prompts are multiples of it


def gpt2(tokens: int) -> tuple[GPT2Model, torch.Tensor]:
    """A small model for prompts of `tokens` tokens, and such a prompt (1, tokens)."""
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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

    longest_prompt = longest(fits, LENGTH_STEP)
    print(f"longest prompt within {args.max_memory}: {longest_prompt} tokens")
    if longest_prompt == 0:
        return
    model, ids = gpt2(longest_prompt)
    inputs = {"input_ids": ids, "use_cache": False}
    chunked = autochunk(model, (), inputs, args.max_memory, args.max_slowdown)
    print(chunked.explain())
    with torch.no_grad():
        print(f"last hidden state: {tuple(chunked(**inputs).last_hidden_state.shape)}")


if __name__ == "__main__":
    main()
