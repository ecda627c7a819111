"""Generation over ranks beside transformers alone: bytes of the cache, seconds of a token.

    torchrun --nproc-per-node 2 benchmarks/generation.py
    torchrun --nproc-per-node 2 benchmarks/generation.py --model gemma3

A random Llama in float32 on CPUs, greedy, or a Gemma 3, of whose 6 layers 5 have a window of 1,024.
"alone" is transformers' own generate on rank 0, while the others wait. Each process computes in one
thread. A later token's time is the median of all tokens after the first, and then of the repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import cores_and_load, cpu_name, print_head, print_row
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig, launch

MODEL = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 512}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "attn_implementation": "sdpa"}
LIMITS = {"max_position_embeddings": 2**20, "eos_token_id": None}
WINDOWS = {"num_hidden_layers": 6, "sliding_window": 1024, "head_dim": 64}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 4}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, WINDOWS),
}
MIB = 2**20
Options = dict[str, Any]  # of generate


class Clock(BaseStreamer):
    """Notes when each token is there."""

    def __init__(self) -> None:
        self.times = list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def seconds(self) -> tuple[float, float]:
        """Of the first token, from the prompt on; of a later one."""
        start, first, *_ = self.times
        later = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        return first - start, median(later)


def on_ranks(model: Any, sp: SequenceParallel, options: Options, clock: Clock) -> tuple[Any, int]:
    """(tokens, bytes of the largest cache of a rank)."""
    with wf_transformers.attach(model, sp, verify=False) as handle:
        cache = wf_transformers.ShardedCache(sp)
        tokens = wf_transformers.generate(model, handle, cache=cache, streamer=clock, **options)
    sizes = [torch.zeros(1) for _ in range(sp.size)]
    dist.all_gather(sizes, torch.tensor([float(cache.nbytes)]))
    return tokens, int(max(sizes))


def alone(model: Any, options: Options, clock: Clock) -> tuple[Any, int]:
    """The same by transformers, on this process."""
    output = model.generate(streamer=clock, return_dict_in_generate=True, **options)
    cache = output.past_key_values
    return output.sequences, sum(x.nbytes for x in (*cache.key_cache, *cache.value_cache))


def measure(generate: Callable[[Clock], tuple[Any, int]], repeats: int) -> tuple[Any, list[str]]:
    """The tokens, and the figures of a row: MiB of the cache, medians of the times."""
    seconds, tokens, nbytes = list[tuple[float, float]](), None, 0
    for _ in range(repeats):
        clock = Clock()
        tokens, nbytes = generate(clock)
        seconds.append(clock.seconds())
    first, later = map(median, zip(*seconds, strict=True))
    return tokens, [f"{nbytes / MIB:.1f}", f"{first:.2f}", f"{1e3 * later:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 16384])
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    launch.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model_class, config_class, layers = MODELS[args.model]
    model: Any = model_class(config_class(**MODEL, **HEADS, **LIMITS, **layers)).eval()
    config = SequenceParallelConfig(sequence_parallel_size=dist.get_world_size())
    sp = SequenceParallel(config)
    if sp.rank == 0:
        print(f"torch {torch.__version__}, {cpu_name()}, {cores_and_load()}\n")
        print_head("prompt", "", "cache of a rank, MiB", "first token, s", "later token, ms")
    for length in args.tokens:
        ids = torch.randint(5, 512, (1, length))  # no padding
        options = {"inputs": ids, "max_new_tokens": args.new, "do_sample": False}
        tokens, figures = measure(partial(on_ranks, model, sp, options), args.repeats)
        if sp.rank == 0:
            print_row(f"{length:,}", f"{sp.size} ranks", *figures)
            expected, figures = measure(partial(alone, model, options), args.repeats)
            same = "the same tokens" if torch.equal(tokens, expected) else "OTHER TOKENS"
            print_row(f"{length:,}", f"transformers alone, {same}", *figures)
        dist.barrier()


if __name__ == "__main__":
    main()
