"""The long tests: `make test` (CI) leaves them out, `make test-all` (.ci/nightly) runs them.

Of a table whose rows take long, the rows that differ most stay in `make test`. `SIX_AND_EIGHT`
ranks as threads run the same code as 2, 3 and 4 ranks, except for concentric rings: from 8 ranks on
their sub-rings have more than one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

TWO = r"-2\]"  # ranks, of tests that also have rows of 4 ranks
SIX_AND_EIGHT = r"(?<!concentric/2)\([68]\)"


def all_but(*rows: str) -> str:
    """A pattern of the rows of a table except these."""
    return rf"\[(?!({'|'.join(rows)})\])"


ENGINES = ("sp4", "tp2_sp2", "pp2_sp2", "offloaded", "tiled")
ENCODERS = (
    "deit-4",
    "vit_mae-4",
    "yolos-4",
    "siglip2-4",
    "dinov3-4",
    "vjepa2-4",
    "wav2vec2_padded-4",
)
SIMILAR = "mistral3|vip|ovis2|glm46v|gemma4|idefics2|deepseek|lighton|paddleocr|lfm2_vl"
"""Models of media that take these as another one does."""
COPIED = ("llama", "bert", "opt", "gpt_neo", "olmoe", "modernbert")
MODELS = ("gpt2", "pp_opt", "llama_classes", "hybrid_zero1", "resumed_4_to_2")

# file -> regular expression of its long tests, "" for all
LONG: dict[str, str] = {
    # jobs of several processes
    "tests/examples/test_restart_processes.py": "",
    "tests/examples/test_autochunk.py": "",
    "tests/integrations/test_colossalai_exact.py": all_but(*ENGINES, *MODELS),
    "tests/integrations/test_colossalai_launch.py": r"one_process\[[ct]|same_curve",
    "tests/integrations/test_colossalai_strategies.py": "",
    "tests/integrations/test_colossalai_faults.py": "_test_passes|large_logits",
    "tests/integrations/test_accelerate.py": "penalised|smoothed|own_loss|recomputed|offloaded|"
    r"ddp_auto|trainer_groups|compiled|the_example",
    "tests/integrations/test_lightning.py": "as_one_process",
    "tests/integrations/test_deepspeed_unmodified.py": r"without_wallfacer\[module\]",
    "tests/integrations/test_deepspeed_exact.py": "two_ranks|compiled_engine|four_ranks.*"
    r"(auto_[12]|few_auto_[03]|shallow_ring_[012]|concentric_2|mesh_1|ulysses_2|ulysses_ring_3|first_2)\]|"
    r"\[(dp2_[012]|token_1|offload_2|(offloaded_)?recompute_0|pretrained_2|offloaded_init_3|chunks_1|"
    r"bf16_2|resumed_1)\]",
    "tests/integrations/test_deepspeed_policies.py": r"\[\w+_(zero[01]|entropy|by_layer)\]|"
    r"\[(rloo_zero3|dpo_zero2|orpo_zero3)\]",
    "tests/integrations/test_experts_engines.py": "zero3|mixtral-ddp|qwen3_moe-fsdp2",
    "tests/integrations/test_generation_processes.py": "in_tensor_parallel|is_named",
    "tests/integrations/test_hetegen.py": r"deepspeeds_own_engine|is_restored\[10\]",
    "tests/integrations/test_diffusers_processes.py": "",
    "tests/integrations/test_diffusers.py": r"of_one_device\[(?!(flux|wan|cogvideox)-2)\w+-"
    r"([123]-|4-contiguous)|"
    rf"with_recomputed_blocks_are.*{all_but('flux', 'wan', 'mochi', 'framepack', 'cosmos')}|"
    r"\[(allegro|cogview3plus|easyanimate|framepack_of_one|glm_image|hunyuan_dit|"
    r"qwen_image_layered|cosmos_control)(-2-contiguous)?\]|autocast.*\[(?!flux|wan|framepack)|"
    r"of_one_device\[(sd3_control|flux_control|auraflow|pixart|cogview4|skyreels\w*|chroma)-4",
    "tests/integrations/test_first_step_compiled.py": "",
    "tests/integrations/test_first_step_trainers.py": r"\[zero2\]|under_deepspeed",
    "tests/integrations/test_deepspeed_published.py": rf"the_example|{all_but('zero3_offload.*')}",
    "tests/integrations/test_draws.py": "loaded_random_numbers",
    "tests/integrations/test_partitioned.py": "fsdp1",
    "tests/integrations/test_torch.py": r"data_parallel|bf16|no_sequence|mesh|fsdp_hybrid\]",
    "tests/integrations/test_preferences.py": r"_groups\]|reward|lora|[ck][pt]o\]",
    "tests/cluster/test_discover_processes.py": "'a', 'a'|'a', 'b', 'a'|spoilt|side_by_side|"
    r"cannot_be_written",
    "tests/cluster/test_measure_links_processes.py": "hosts0",
    "tests/cluster/test_faults_processes.py": r"[io]-1\]|exit 3-deepspeed|without_a_name|"
    r"left_out.*\[gloo|at_the_timeout\[0|(exit 0|raise)-mpi",
    "tests/benchmarks/test_peers_processes.py": "",
    "tests/launch/test_launch_processes.py": "end_well|joins_again|of_the_readme",
    "tests/runtime/test_attention_processes.py": r"over_mpi\[4",
    "tests/dsp/test_strategies_processes.py": "over_mpi",
    "tests/dsp/test_compiled_processes.py": "",
    # ranks as threads
    "tests/runtime/test_exact.py": rf"{SIX_AND_EIGHT}|on_every_schedule\[[1368]|_long|_many|"
    r"contiguous.*\[(full|two_sided|documents|window)-8|dtypes.*(dtype2|window)|"
    r"on_every_schedule\[4-(bicausal|few_rows|window_w|prefix_lm)|keeping.*(\(2\)|two_sided)",
    "tests/runtime/test_scores.py": rf"{SIX_AND_EIGHT}|drawn",
    "tests/runtime/test_alibi.py": rf"{SIX_AND_EIGHT}|tile_without_alibi\[(300|-699)",
    "tests/runtime/test_ulysses_chunks.py": r"\[[12]-[\d-]+\]|is_exact\[(3-|0-4-2-2-8)",
    "tests/runtime/test_hosts_once.py": r"\(6\)|nic\[\w+-2-4|"
    r"mesh/(8x1|2x4).*-(causal|window|full)\]",
    "tests/runtime/test_device_only.py": r"on_the_gpu_and_reads_no_value\[(?!sdpa on an Ampere)|"
    r"options_stays_on_the_gpu\[(None-config1|3-config0)",
    "tests/parallel/test_chosen.py": r"chosen\[.*-[1-9]\]|windows_are_exact\[\w+-16|\[True-auto",
    "tests/parallel/test_lss_training.py": r"one_rank\[3",
    "tests/dsp/test_video_dit.py": r"published|exact\[(dsp, stages repeated|ring|(lss|dsp)-[68])",
    "tests/gpu/test_cudnn.py": r"on_cudnn_is_exact\[(documents|full|window)|all_tiles.*full",
    "tests/integrations/test_families.py": rf"{TWO}|(deep_copy|verify).*{all_but(*COPIED)}|"
    r"gradients_are_exact\[(phimoe_window|xlm_r|camembert|\w+_grouped|qwen2_moe|nemotron|codegen)",
    "tests/integrations/test_rope.py": TWO,
    "tests/integrations/test_generation.py": rf"{TWO}|(beams|penalty|lookup)-zigzag|"
    r"family.*(phimoe|olmoe|moe|gptj|gpt_neo|codegen|nemotron|stablelm|n_grouped|e_window)-3|"
    r"on_the_left.*\[(mixtral|opt|llama)",
    "tests/integrations/test_generation_media.py": r"2-zigzag|4-contiguous-full|"
    rf"process\[({SIMILAR}|qwen2_vl|aya_v|llava_next|pixtral|smolvlm|got_)",
    "tests/integrations/test_stacks.py": rf"{TWO}|\[(mbart|mt5|umt5)|"
    r"\[(bart|t5|clip_mask_of_ones)(-4)?\]",
    "tests/integrations/test_encoders.py": rf"gradients_are_exact{all_but(*ENCODERS)}|"
    rf"layers_are_exact{all_but('siglip2', 'vjepa2')}",
    "tests/integrations/test_mixers.py": rf"{TWO}|document\[.*-contiguous|copy.*(jamba|zamba)\]|"
    r"(exact|document)\[zamba-",
    "tests/integrations/test_heads.py": r"are_exact\[2-",
    "tests/integrations/test_media.py": rf"\[({SIMILAR}|internvl|voxtral)(?!\w*-4-z)|"
    r"exact\[\w+-[12]-contiguous|its_tokens\[(qwen2_vl|llava)|images_are_exact.*-4-contiguous|"
    r"recomputed.*\[(?!gemma3|llava\]|qwen2_5|idefics3)|batches_are_exact\[\w+-[12]\]|"
    r"images_are_exact\[(?!llava-)\w+-1|batches_are_exact\[(llava_|aya|pixtral|smolvlm|got_)",
    "tests/integrations/test_verify.py": r"models_pass\[(True-(l|m|qwen2)|False-(b|g|qwen3))",
    "tests/integrations/test_budget.py": r"its_bytes\[.*('device'|float32.*'none')|"
    r"its_bytes\[(?!Llama|Falcon).*(host|tile=64)|its_bytes\[(Phi|Ol|Q|OPT|GPT)|of_a_llama.*(device|float32)|"
    "of_a_mixture.*float32|capped.*t32",
    "tests/integrations/test_language_models.py": "",
    "tests/integrations/test_custom_loss.py": rf"{TWO}|"
    r"\[(z_of_items|weighted|liger_and_logits|liger-|ignore_i|wrapper)",
    "tests/integrations/test_activation_checkpointing.py": "without.*gpt|None-(mistral|bert)|"
    "by_the_model",
    "tests/parallel/test_scores.py": "drawn",
    "tests/parallel/test_sequence_parallel.py": r"routes_are_exact\[[023]-8",
    "tests/decode/test_windows.py": r"one_device\[2",
    "tests/integrations/test_experts.py": r"on_every_rank\[.*-2\]",
    "tests/integrations/test_generation_windows.py": "gemma3-(padded|beams|greedy)-contiguous",
    "tests/dsp/test_stages.py": r"fewest_switches\[.*-[36]\]",
    # one process
    "tests/lowering/test_message_order.py": r"its_receive\[\w+-\w+-[68]",
    "tests/planner/test_typical.py": r"on_the_real_documents|share_a_plan|fit_no_memory.*\[8\]",
    "tests/planner/test_search.py": "best_of_all.*(heads=6|2 x 4 ranks|1 x 8 ranks, 0)|"
    r"better_links|all_ranks\[8-128",
    "tests/planner/test_proxy.py": "faster_on_more_ranks_than_are_counted|"
    r"part\[(1024-zigzag|8192-contiguous)",
    "tests/planner/test_splits.py": "only_save_memory",
    "tests/planner/test_hosts_once.py": r"near_in_time\[32",
    "tests/cost/test_closed_form.py": r"equally_far\[(18|1-16)|of_a_nic\[4-4-2|"
    r"full_mask\[(256|None-(4-4-4-2-8|8-2-1-2-2|4-4-2-1-1))|no_whole_digits\[[36]",
    "tests/lowering/test_host_rounds.py": r"a_host_once\[8-(?!2-causal|4-documents)",
    "tests/cost/test_exact_cost.py": r"those_of_the_programs\[[68]",
    "tests/cli/test_plan.py": r"part_of_many_ranks|through_a_pipe|documents\[32|columns\[more[23]|"
    r"ranks_send\[more2|partial_results|names_the_kernel|"
    r"for_a_window\[options2",
    "tests/cli/test_budget.py": "fits_80",
    "tests/cli/test_model.py": "latents|bench_takes",
    "tests/cli/test_bench.py": "writes_a_trace|the_ring_is_added|placements_and|as_a_config",
    "tests/cli/test_verify.py": r"first_layers.*\[False",
    "tests/cli/test_chunk.py": "a_large_model_under_a_budget|longest_sequence_within|"
    r"model_itself\[(bart|gpt2)|several_parts\[t5|answered_with_the_longest|modernbert|"
    "never_needs_more|for_text_has_the_dtype|below_the_step",
    "tests/schedule/test_documents.py": r"are_cut\[64",
    "tests/kernels/test_kernels.py": "long_tiles.*dtype[02]",
    "tests/kernels/test_half_precision.py": "long: (?!long window|causal-|anti-causal-)",
    "tests/kernels/test_tile_split.py": r"long_windows.*\[(10|100|3|64-64|\d+-\d+-450)-",
    "tests/autochunk/test_autochunk.py": r"outputs_.*\[(?!gpt2-sdpa|vit-eager)|torch_compile",
    "tests/autochunk/test_generation.py": r"on_the_left|slices\[mistral|encoder_and_decoder|"
    "cache_argument",
    "tests/autochunk/test_changed_models.py": r"is_used\[(forward hook|no bias|linear\]|wider "
    r"weight|number\])",
    "tests/autochunk/test_diffusers.py": rf"{all_but('deep_compression')}|pipeline|compiled",
    "tests/autochunk/test_evoformer_unet.py": "fused|unet_condition|to_the_least|unet-eager",
    "tests/autochunk/test_search.py": "in_another_process",
    "tests/autochunk/test_overwrite.py": "reversed_rows|float32|drawn|residual_stream",
    "tests/autochunk/test_overwrite_plans.py": "compile",
    "tests/hetegen/test_beside_autochunk.py": "both_memory_budgets",
    "tests/hetegen/weights/test_law.py": "no_resident_shares_of_a_grid",
    "tests/autochunk/test_copies.py": r"its_mask\[padding",
    "tests/autochunk/test_experts.py": r"by_tokens\[shared.*Float64|of_the_model\[Grouped",
    "tests/autochunk/test_inputs.py": r"torch_compile\[None",
    "tests/autochunk/test_refusals.py": "no_more_than_the_plan",
    "tests/autochunk/tiling/test_training.py": r"is_not_planned\[(one|log|losses)|gemma2",
    "tests/cli/test_explain.py": r"file\[args1-64",
    "tests/hetegen/weights/test_jobs.py": r"\[([4-9]\d)\]",
    "tests/parallel/test_choose.py": r"tokens_a_rank_can_be_planned\[(16|31)",
    "tests/parallel/test_slices.py": r"configuration\[.*8-(?!block_causal|prefix_tree)",
    "tests/hetegen/test_lanes.py": r"threads_end\[link",
    "tests/hetegen/test_exact.py": r"planned\[(falcon|mixtral|gpt2|llama)-3",
    "tests/autochunk/slicing/test_rules_models.py": "llama-eager|(vit|gpt2)-sdpa",
}


def is_long(nodeid: str) -> bool:
    file, _, test = nodeid.partition("::")
    return file in LONG and re.search(LONG[file], test) is not None


def selected_cases(
    request: pytest.FixtureRequest, cases: Iterable[str], parameter: str = "name"
) -> list[str]:
    """The cases that the selected tests of the requesting module read, so that no other case runs.

    Args:
        request: of a fixture of the module's scope.
        parameter: of the tests, whose value is the name of a case.
    """
    module = request.node.nodeid
    tests = [item for item in request.session.items if item.nodeid.startswith(f"{module}::")]
    names = {item.callspec.params.get(parameter) for item in tests if hasattr(item, "callspec")}
    return [name for name in cases if name in names]
