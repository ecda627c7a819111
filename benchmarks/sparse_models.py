"""Compare models with sparse attention as transformers runs them and attached, on one CPU.

    python benchmarks/sparse_models.py
    python benchmarks/sparse_models.py --seqlens 4096 8192 --models deepseek_v4

One process is the only rank, so that nothing is sent: this is what a rank saves by reading only
what a row chose. Small models of random weights, float32, forward and backward without checkpoints;
each run is a fresh process. Lines are medians of runs in turns; memory is above what the model
takes. Needs transformers 5 (`make test-newest` sets it up in .venv-newest).
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from statistics import median
from typing import Any

import torch
import transformers
from measure import cores_and_load, cpu_name, peak, print_head, print_row, reset_peak

import wf_transformers
from wf_backends import SequenceParallel, SequenceParallelConfig
from wf_backends.comm.threads import run_threads

VOCAB = 256
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 256,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 48, "v_head_dim": 48, "head_dim": 16}
EXPERTS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8}
ENTRIES = {
    "head_dim": 64,
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "o_lora_rank": 32,
    "o_groups": 2,
    "hc_mult": 2,
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    "compress_rates": {"heavily_compressed_attention": 128, "compressed_sparse_attention": 4},
    "mlp_layer_types": ["moe", "moe"],
}
MODELS = {
    "deepseek_v32": ("DeepseekV32", {**SMALL, **LATENTS, **EXPERTS}),
    "deepseek_v4": ("DeepseekV4", {**SMALL, **ENTRIES}),
}


def main() -> None:
    """Print the machine, then a line for each model and sequence length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, {cpu_name()}, {cores_and_load()}, 1 thread, float32")
    print(f"{SMALL['num_hidden_layers']} layers, 256 chosen keys or entries a row\n")
    print_head("model", "tokens", "transformers s, GiB", "attached s, GiB", "time x", "memory x")
    for name in args.models:
        for seqlen in args.seqlens:
            pairs = [[in_fresh_process(name, seqlen, x) for x in (0, 1)] for _ in range(args.runs)]
            alone, attached = (
                [median(values) for values in zip(*runs, strict=True)]
                for runs in zip(*pairs, strict=True)
            )
            cells = [f"{seconds:.1f}, {held / 2**30:.2f}" for seconds, held in (alone, attached)]
            ratios = [f"{ours / theirs:.2f}" for ours, theirs in zip(attached, alone, strict=True)]
            print_row(name, seqlen, *cells, *ratios)


def in_fresh_process(name: str, seqlen: int, attached: int) -> tuple[float, int]:
    """`step`, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(step, name, seqlen, attached).result()


def step(name: str, seqlen: int, attached: int) -> tuple[float, int]:
    """Seconds of a forward and backward, and the bytes that it held."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prefix, sizes = MODELS[name]
    model = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**sizes)
    )
    batch = {"input_ids": torch.randint(5, VOCAB, (1, seqlen))}
    if not attached:
        return measured(model, {**batch, "use_cache": False})

    def rank(comm: Any) -> tuple[float, int]:
        sp = SequenceParallel(SequenceParallelConfig(sequence_parallel_size=1), comm)
        with wf_transformers.attach(model, sp, verify=False):
            return measured(model, wf_transformers.forward_kwargs(model, sp.shard_batch(batch)))

    return run_threads(1, rank, timeout=3600.0)[0]


def measured(model: Any, inputs: dict[str, Any]) -> tuple[float, int]:
    """Seconds of a forward and backward of the model, and the bytes that it held."""
    before, start = reset_peak(), time.perf_counter()
    model(**inputs).logits.square().mean().backward()
    return time.perf_counter() - start, peak() - before


if __name__ == "__main__":
    main()
