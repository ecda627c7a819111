"""The Trainer of transformers and loops of accelerate's, spread by wf_accelerate, train as without.

Jobs of four ranks, beside jobs without us of one rank for each sequence at a time.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate.accelerator  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402

import wf_accelerate  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.accelerate_jobs import Results, run_both  # noqa: E402
from tests.integrations.deepspeed_jobs import ROOT, run_ranks  # noqa: E402
from tests.integrations.deepspeed_trainer import assert_close_tokens  # noqa: E402
from tests.integrations.deepspeed_trainer import model as llama  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    batch,
    build,
    gradients,
    sequence_parallel,
)
from tests.long import selected_cases  # noqa: E402
from wf_backends import SequenceParallel, SequenceParallelConfig  # noqa: E402
from wf_transformers import Handle, WholeBatchHooks, attach, loss_only  # noqa: E402

CONCENTRIC = {"sequence_parallel_size": 4, "route": {"name": "concentric", "team_size": 2}}
RING = {"sequence_parallel_size": 2, "route": {"name": "ring"}, "verify": False}
OFFLOAD = {"activation_checkpointing": {"offload": True}}
CASES: dict[str, dict[str, Any]] = {
    "trainer": {"kind": "trainer", "words": CONCENTRIC, "gradient_accumulation": 4},
    "trainer_groups": {"kind": "trainer", "words": RING, "gradient_accumulation": 2},
    "trainer_fsdp": {
        "kind": "trainer_fsdp",
        "words": RING | {"verify": True},
        "gradient_accumulation": 1,
    },
    "recomputed": {"kind": "recomputed", "words": RING, "gradient_accumulation": 1},
    "offloaded": {"kind": "recomputed", "words": RING | OFFLOAD, "gradient_accumulation": 1},
    "own_loss": {"kind": "own_loss", "words": RING, "gradient_accumulation": 1},
    "smoothed": {
        "kind": "smoothed",
        "words": CONCENTRIC | {"verify": False},
        "gradient_accumulation": 1,
    },
    "penalised": {"kind": "penalised", "words": RING, "gradient_accumulation": 2},
    "stream": {"kind": "stream", "words": RING, "gradient_accumulation": 1},
    "ddp": {"kind": "ddp", "words": RING, "gradient_accumulation": 1},
    "ddp_auto": {"kind": "ddp", "words": {"sequence_parallel_size": 4}, "gradient_accumulation": 1},
    "fsdp": {"kind": "fsdp", "words": RING, "gradient_accumulation": 1},
}
LOADS_ON_CPUS = int(transformers.__version__.partition(".")[0]) >= 5
if LOADS_ON_CPUS:
    CASES["resumed"] = {"kind": "resumed", "words": RING, "gradient_accumulation": 2}
# The last: the Trainer sets variables of the environment that compile whatever follows
CASES["compiled"] = {"kind": "compiled", "words": RING, "gradient_accumulation": 1}
LOOPS = [name for name, case in CASES.items() if case["kind"] in ("ddp", "fsdp")]
TRAINERS = [name for name in CASES if name not in (*LOOPS, "resumed")]


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Results, Results]:
    """With us, and without: under DDP, whatever it is with us."""
    kinds = {"fsdp": "ddp"} | dict.fromkeys(("trainer_fsdp", "resumed", "compiled"), "trainer")
    cases = {
        name: CASES[name] | {"alone": {"kind": kinds.get(CASES[name]["kind"], CASES[name]["kind"])}}
        for name in selected_cases(request, CASES)
    }
    return run_both("accelerate_worker.py", cases, tmp_path_factory.mktemp("accelerate"))


@pytest.mark.processes
@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_trains_as_without_us(name: str, found: tuple[Results, Results]) -> None:
    """Losses, gradient norms, the evaluation, and every sample's predictions, once."""
    ours, plain = (results[name] for results in found)
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert ours["offloads"] == (name == "offloaded")
    assert_same_curve(ours, plain)
    for key in {"eval_samples", "eval_accuracy"} & set(plain["eval"]):
        assert ours["eval"][key] == pytest.approx(plain["eval"][key], rel=1e-5)
    assert ours["labels"] == plain["labels"]
    assert ours["total_flos"] == pytest.approx(plain["total_flos"]) and plain["total_flos"] > 0
    logits, its_logits = (torch.tensor(one["logits"]) for one in (ours, plain))
    assert logits.shape == its_logits.shape and len(logits) == 7
    assert_close_tokens(logits, its_logits)


@pytest.mark.processes
@pytest.mark.skipif(
    not LOADS_ON_CPUS, reason="transformers 4 loads an optimizer to cpu:0, which torch has not"
)
@pytest.mark.parametrize("name", ["resumed"])
def test_the_trainer_goes_on_from_a_checkpoint(name: str, found: tuple[Results, Results]) -> None:
    ours, plain = (results[name] for results in found)
    assert_same_curve(ours, plain)


def assert_same_curve(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for (loss, norm), (its_loss, its_norm) in zip(ours["steps"], plain["steps"], strict=True):
        assert loss == pytest.approx(its_loss, abs=1e-4)  # rounded
        assert norm == pytest.approx(its_norm, rel=1e-5)
    assert ours["eval"]["eval_loss"] == pytest.approx(plain["eval"]["eval_loss"], rel=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trainer", [False, True, True]),
        ("smoothed", [True, True, True]),
        ("stream", [False, False, True]),  # it has no metrics
    ],
)
def test_logits_travel_where_somebody_wants_them(
    name: str, expected: list[bool], found: tuple[Results, Results]
) -> None:
    """In training, evaluation and prediction: for a loss of one's own, for metrics, for both."""
    ours, _ = found
    assert [any("unshard" in label for label in sent) for sent in ours[name]["sent"]] == expected


@pytest.mark.processes
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_as_without_us(name: str, found: tuple[Results, Results]) -> None:
    """In float64, but for the norms inside Llama, which round in float32: up to ten steps of it.

    FSDP2 beside DDP without us.
    """
    ours, plain = (results[name] for results in found)
    for step, its_step in zip(ours["steps"], plain["steps"], strict=True):
        assert step == pytest.approx(its_step, rel=1e-6)
    assert ours["lengths"] == plain["lengths"]


@pytest.mark.processes
def test_the_example_trains_alike_on_one_and_on_four_ranks(tmp_path: Path) -> None:
    words = ["--steps", "2", "--seq-len", "256", "--out", str(tmp_path)]
    told = []
    for ranks in (1, 4):
        script = [str(ROOT / "examples" / "trainer.py"), *words]
        printed = run_ranks([*script, "--sequence-parallel-size", str(ranks)], ranks)
        (last,) = (line for line in printed[0].splitlines() if line.startswith("held-out loss"))
        told.append(float(last.split()[2]))
        assert not any("held-out loss" in text for text in printed[1:])
    assert told[0] == pytest.approx(told[1], abs=2e-4)  # of four decimals


def test_logits_without_labels_are_whole_and_pass_gradients() -> None:
    """A loss that every rank makes of them counts once where gradients are averaged."""
    given = batch(2)
    ids = {"input_ids": given["input_ids"]}
    alone = build("llama", "sdpa", {})
    logits = alone(**ids).logits
    logits.square().mean().backward()

    def rank(comm: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model, sp = build("llama", "eager", {}), sequence_parallel(comm)
        connected = attach(model, sp)
        WholeBatchHooks(model, connected)
        ours = model(**ids).logits
        ours.square().mean().backward()
        return ours.detach(), gradients(model)

    ranks = run_threads(2, rank)
    for whole, _ in ranks:
        assert (whole - logits).abs().max() < 1e-9
    for name, grad in gradients(alone).items():
        mean = sum(grads[name] for _, grads in ranks) / 2
        assert (mean - grad).abs().max() < 1e-6 * grad.abs().max() + 1e-9, name


def test_a_trainer_is_told_nothing_of_logits_for_a_model_without_hooks() -> None:
    def step(model: Any, inputs: dict[str, Any], prediction_loss_only: bool) -> dict[str, Any]:
        return inputs

    model, sp = llama(), SequenceParallel(SequenceParallelConfig())
    wrapped = torch.nn.Sequential(model)
    hooks = WholeBatchHooks(model, attach(model, sp))
    assert loss_only(step, wrapped, {}, True) == {"whole_logits": False}
    assert loss_only(step, wrapped, {}, prediction_loss_only=False) == {}
    hooks.remove()
    assert loss_only(step, wrapped, {}, True) == {}


@pytest.mark.parametrize("always", [False, True])
def test_whose_logits_a_call_with_labels_gives(always: bool) -> None:
    """In training, in evaluation, and where the call says it."""
    given = batch(seqlen=24)

    def rank(comm: Any) -> list[int]:
        model, sp = build("llama", "eager", {}), sequence_parallel(comm)
        hooks = WholeBatchHooks(model, attach(model, sp), always)
        said = [model(**given, whole_logits=whole) for whole in (True, False)]
        found = [*said, model.eval()(**given), model(**given, whole_logits=False)]
        if always:
            found.append(model.train()(**given))
        hooks.remove()
        return [one.logits.shape[1] for one in found]

    assert run_threads(2, rank) == [[24, 12, 24, 12] + always * [24]] * 2


def test_a_batch_is_not_cut_twice() -> None:
    given = batch(seqlen=24)

    def rank(comm: Any) -> tuple[float, float]:
        model, sp = build("llama", "eager", {}), sequence_parallel(comm)
        first = attach(model, sp)
        WholeBatchHooks(model, first)
        with attach(model, sp, verify=False) as second:
            with pytest.raises(ValueError, match="LlamaForCausalLM takes whole batches already"):
                WholeBatchHooks(model, second)
        loss = model(**given).loss.item()
        first.remove()
        WholeBatchHooks(model, attach(model, sp))
        return loss, model(**given).loss.item()

    assert all(one == again for one, again in run_threads(2, rank))


def test_a_mean_over_local_logits_is_refused() -> None:
    """As a Trainer's `compute_loss` takes one beside `outputs.loss`."""

    def rank(comm: Any) -> None:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        output = model(**batch(seqlen=24))
        output.loss.backward()
        logits, one = output.logits, torch.ones(())
        for use in (
            lambda: torch.softmax(logits, -1).mean(),
            lambda: logits.float().mean(),
            lambda: logits[:, :-1],
            lambda: one * logits,
            lambda: 2 * logits,
            lambda: -logits,
            lambda: output["logits"].shape,
        ):
            with pytest.raises(NotImplementedError, match="whole_logits=True"):
                use()
        assert not hasattr(logits, "somebodys")

    run_threads(2, rank)


@pytest.mark.parametrize("own", [False, True])
def test_labels_at_padding_are_told_of(own: bool) -> None:
    """Once; they count for nothing, as if they were -100, in a loss of the model's own, too."""
    given = batch(2, seqlen=24)
    given["attention_mask"] = torch.ones(2, 24).long()
    given["attention_mask"][1, 20:] = 0
    masked = given["labels"].masked_fill(given["attention_mask"] == 0, -100)
    words = {"ignore_index": -100} if own else {}
    wanted = build("llama", "eager", {})(**given | {"labels": masked}).loss

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        loss = model(**given, **words).loss
        model(**given, **words)
        return loss.item()

    with pytest.warns(UserWarning, match="4 labels of this batch stand") as told:
        found = run_threads(2, rank)
    assert sum("labels of this batch" in str(one.message) for one in told) == 2
    assert found == pytest.approx([wanted.item()] * 2, rel=1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_a_batch_without_labels_has_no_loss(train: bool) -> None:
    """The mean over nothing is no number, and its gradient is 0."""
    given = batch(seqlen=24)
    given["labels"][:] = -100
    alone = build("llama", "eager", {}).train(train)(**given).loss
    assert alone.isnan()

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {}).train(train)
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        loss = model(**given).loss
        loss.backward()
        assert all(not grad.any() for grad in gradients(model).values())
        return loss.item()

    assert all(loss != loss for loss in run_threads(2, rank))


@pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "floating_point_ops"),
    reason="the Trainer of transformers 5 counts itself",
)
def test_a_ranks_operations_are_those_of_its_part() -> None:
    """The Trainer sums what `floating_point_ops` of its model gives over all ranks."""
    given = batch(seqlen=24)
    wanted = build("llama", "eager", {}).floating_point_ops(given)

    def rank(comm: Any) -> float:
        model = build("llama", "eager", {})
        with attach(model, sequence_parallel(comm)) as handle:
            WholeBatchHooks(model, handle)
            found = model.floating_point_ops(given)
        assert model.floating_point_ops(given) == wanted
        return found

    assert sum(run_threads(4, rank)) == wanted


def test_a_position_table_without_room_for_padding_is_enough() -> None:
    """23 tokens on two ranks are padded to 24."""
    given = batch(seqlen=23)
    wanted = build("gpt2", "eager", {"n_positions": 23})(**given).loss

    def rank(comm: Any) -> torch.Tensor:
        model = build("gpt2", "eager", {"n_positions": 23})
        WholeBatchHooks(model, attach(model, sequence_parallel(comm)))
        return model(**given).loss.detach()

    for loss in run_threads(2, rank):
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_a_mask_that_is_not_understood_is_refused() -> None:
    """It would be replaced by one that says nothing: the first tokens here see each other."""
    model, sp = llama(), SequenceParallel(SequenceParallelConfig())
    mask = torch.ones(1, 1, 8, 8).tril()
    mask[..., :4, :4] = 1
    with attach(model, sp) as handle:
        WholeBatchHooks(model, handle)
        for wrong, message in (
            (mask, "attention_mask must be bool, or 0 where a key is seen"),
            (mask[:, 0], r"attention_mask must be a tensor \(1, 8\)"),
            ({"full_attention": mask}, r"attention_mask must be a tensor \(1, 8\)"),
        ):
            with pytest.raises(ValueError, match=message):
                model(torch.ones(1, 8, dtype=torch.int64), attention_mask=wrong)
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_what_the_caller_gives_is_not_overwritten() -> None:
    """Positions that are not (b, S) cannot be cut; ours would come in their place."""
    model = build("gpt2", "eager", {})
    with attach(model, SequenceParallel(SequenceParallelConfig())) as handle:
        WholeBatchHooks(model, handle)
        with pytest.raises(ValueError, match="position_ids.* would be overwritten"):
            model(torch.ones(1, 8, dtype=torch.int64), position_ids=torch.arange(8) + 5)


def test_an_error_takes_back_what_was_attached() -> None:
    model, sp = llama(), SequenceParallel(SequenceParallelConfig())
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attach(model, sp).removed_on_error() as handle:
        assert model.config._attn_implementation == handle.name
        raise ZeroDivisionError
    assert model.config._attn_implementation == before and not model._forward_pre_hooks


def test_what_was_connected_is_as_before_when_it_is_removed() -> None:
    accelerator, model = Accelerator(cpu=True), llama()
    before, functions = dict(vars(accelerator)), dict(vars(accelerate.accelerator))
    given = batch()["input_ids"] % 32
    wanted = model(given, labels=given).loss
    with wf_accelerate.connect(model, accelerator, {"sequence_parallel_size": 1}) as connected:
        assert model(given, labels=given).loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert set(vars(accelerator)) - set(before) == {"prepare_data_loader", "gather_for_metrics"}
        assert isinstance(connected, Handle) and connected.sp.size == 1
        assert connected.checkpoint_kwargs and connected.report() == {}
    assert vars(accelerator) == before and vars(accelerate.accelerator) == functions
    assert not model._forward_pre_hooks and not model._forward_hooks


def accelerator_of(kind: str = "MULTI_GPU", **more: Any) -> Any:
    """As much of one as is looked at before it is used."""
    words = {"distributed_type": SimpleNamespace(value=kind), "_models": [], "_dataloaders": []}
    words["num_processes"] = 1
    return SimpleNamespace(**words | more)


@pytest.mark.parametrize(
    ("accelerator", "words", "error", "told"),
    [
        (accelerator_of("DEEPSPEED"), {}, NotImplementedError, "python -m wf_deepspeed"),
        (accelerator_of("MEGATRON_LM"), {}, NotImplementedError, "MEGATRON_LM"),
        (accelerator_of(_models=[1]), {}, ValueError, "before accelerator.prepare"),
        (accelerator_of(_dataloaders=[1]), {}, ValueError, "before accelerator.prepare"),
        (
            accelerator_of(num_processes=4),
            {},
            ValueError,
            "counts 4 processes, the job has 1 ranks",
        ),
        (accelerator_of(), {"sequence_paralel_size": 2}, ValueError, "sequence_parallel_size"),
        (accelerator_of(), {"sequence_parallel_size": 2}, ValueError, "must divide the 1 ranks"),
        (
            accelerator_of(parallelism_config=SimpleNamespace(non_data_parallel_size=2)),
            {},
            NotImplementedError,
            "leave parallelism_config out",
        ),
    ],
)
def test_what_cannot_go_with_it_is_refused(
    accelerator: Any, words: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        wf_accelerate.connect(llama(), accelerator, words)


def test_a_model_with_another_forward_is_refused() -> None:
    model = llama()
    model.forward = lambda *_, **__: None
    with pytest.raises(NotImplementedError, match="forward of this LlamaForCausalLM was replaced"):
        wf_accelerate.connect(model, accelerator_of(), {})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"model_init": llama}, "give model="),
        ({"args": SimpleNamespace(n_gpu=8)}, "--nproc-per-node 8"),
        ({"model": None}, "no model"),
    ],
)
def test_a_trainer_that_cannot_be_spread_is_refused(more: dict[str, Any], told: str) -> None:
    words = {"args": SimpleNamespace(n_gpu=1), "model": llama(), "model_init": None}
    trainer: Any = SimpleNamespace(**words | more, accelerator=accelerator_of())
    with pytest.raises((ValueError, NotImplementedError), match=told):
        wf_accelerate.connect_trainer(trainer, {})


def test_batches_that_rank_0_hands_out_are_refused() -> None:
    data = torch.utils.data.DataLoader(list(range(4)))
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config.dispatch_batches = True
    with wf_accelerate.counted_by_group(accelerator, lambda: 2):
        with pytest.raises(NotImplementedError, match="dispatch_batches=True"):
            accelerator.prepare(data)
