"""Text after a prompt that is cut over ranks: the cache of keys and values lies on all of them.

torchrun --nproc-per-node 4 examples/long_generation.py
torchrun --nproc-per-node 8 examples/long_generation.py --model FOLDER --prompt-file book.txt

Without --model it is a random byte-level Llama, and its text is noise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig, launch


def byte_level_llama() -> Any:
    """A random model whose tokens are bytes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2**20,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or name of transformers")
    parser.add_argument("--prompt-file", type=Path, default=Path(__file__).parents[1] / "README.md")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    job = launch.init()  # torchrun, mpirun, srun
    text = args.prompt_file.read_text()
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = tokenizer(text, return_tensors="pt").input_ids
    else:
        model, ids = byte_level_llama(), torch.tensor([[*text.encode()]])
    model, ids = model.to(job.device).eval(), ids.to(job.device)

    sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=job.world_size))
    handle = wf_transformers.attach(model, sp)
    cache = wf_transformers.ShardedCache(sp)
    start = time.perf_counter()
    tokens = wf_transformers.generate(
        model, handle, ids, cache, max_new_tokens=args.max_new_tokens, do_sample=False
    )
    seconds = time.perf_counter() - start
    if sp.rank == 0:
        new = tokens[0, ids.shape[1] :]
        print(tokenizer.decode(new) if args.model else bytes(new.tolist()).decode(errors="replace"))
        mib = cache.nbytes / 2**20
        print(f"{ids.shape[1]} + {args.max_new_tokens} tokens in {seconds:.2f} s")
        print(f"rank 0 of {sp.size} holds {mib:.1f} MiB of keys and values")


if __name__ == "__main__":
    main()
