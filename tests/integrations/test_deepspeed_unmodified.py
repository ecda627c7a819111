"""`python -m wf_deepspeed script.py`: scripts that know nothing of it train as one process does."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)
pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

import accelerate  # noqa: E402
import deepspeed  # noqa: E402
import torch  # noqa: E402
import transformers as tf  # noqa: E402

import wf_deepspeed  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.deepspeed_trainer import assert_close_tokens  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    LLAMA,
    assert_close,
    batch,
    build,
    gradients,
    sequence_parallel,
)
from wf_deepspeed import Block, WallFacer, unmodified  # noqa: E402
from wf_deepspeed.__main__ import script_first, take_timeout  # noqa: E402
from wf_transformers import WholeBatchHooks, attach_model  # noqa: E402

pytestmark = [pytest.mark.deepspeed, pytest.mark.processes]

SCRIPT = str(Path(__file__).with_name("deepspeed_trainer.py"))
# As `python -m wf_deepspeed`, without half a minute of compilation at the first run.
RUN = """
import sys, wf_deepspeed
from wf_deepspeed.__main__ import main
with wf_deepspeed.without_shared_memory_op():
    main(sys.argv[1:])
"""
IDS = batch(seqlen=24)["input_ids"]
RING = {"sequence_parallel_size": 2, "route": {"name": "ring"}}


def train(folder: Path, ranks: int, accumulation: int, stage: int | None = None) -> dict[str, Any]:
    """What the Trainer logged; with a stage, through our door with two ranks a sequence.

    Two ranks import all for themselves, in the order of the script and the door.
    """
    out = str(folder / f"{ranks}_{stage}.json")
    if stage is None:
        run_ranks([SCRIPT, out, str(accumulation)], ranks)
        return json.loads(Path(out).read_text())
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "wallfacer": {"enabled": True, **RING},
    }
    path = folder / f"ds_{ranks}_{stage}.json"
    path.write_text(json.dumps(config))
    run_ranks(["-c", RUN, SCRIPT, out, str(accumulation), str(path)], ranks, fresh=ranks == 2)
    return json.loads(Path(out).read_text())


@pytest.mark.parametrize(("groups", "accumulation", "stage"), [(1, 4, 2), (2, 2, 3)])
def test_the_trainer_trains_as_without_us(
    groups: int, accumulation: int, stage: int, tmp_path: Path
) -> None:
    """On groups of two ranks, beside one process for each group and no DeepSpeed."""
    wanted = train(tmp_path, groups, accumulation)
    found = train(tmp_path, 2 * groups, accumulation, stage)
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    for step, plain in zip(found["steps"], wanted["steps"], strict=True):
        assert step["loss"] == pytest.approx(plain["loss"], abs=1e-4)  # rounded
        assert step["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    assert found["eval"]["eval_loss"] == pytest.approx(wanted["eval"]["eval_loss"], rel=1e-5)
    logits, plain = (torch.tensor(one["predictions"]) for one in (found, wanted))
    assert logits.shape == plain.shape and len(logits) == 7  # each sample once
    assert_close_tokens(logits, plain)


def hooked(
    family: str, fn: Callable[[Any, Any], Any], layout: str = "zigzag", **more: Any
) -> list[Any]:
    """fn(model, sp) on two ranks, with a model that takes whole batches."""

    def rank(comm: Any) -> Any:
        sp, model = sequence_parallel(comm, layout), build(family, "eager", more)
        return with_hooks(model, sp, fn)

    return run_threads(2, rank)


def with_hooks(model: Any, sp: Any, fn: Callable[[Any, Any], Any]) -> Any:
    nobody: Any = None  # groups: asked for nothing here
    cpu = torch.device("cpu")
    component = WallFacer(attach_model(model, sp), Block(sp.config), nobody, cpu, lambda: 1)
    WholeBatchHooks(model, component)
    return fn(model, sp)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_rank_is_told_the_loss_of_its_group_while_training(family: str) -> None:
    """A masked model's labels are not shifted."""
    given = batch(2, seqlen=24)
    given["labels"][:, 3:15] = -100
    alone = build(family, "sdpa", {})
    loss = alone(**given).loss
    loss.backward()

    def train(model: Any, _: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ours = model(**given).loss
        ours.backward()
        return ours.detach(), gradients(model)

    found = hooked(family, train)
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][0] == pytest.approx(loss.item(), rel=1e-6)
    for name, grad in gradients(alone).items():
        mean = sum(grads[name] for _, grads in found) / 2
        assert (mean - grad).abs().max() < 1e-6 * grad.abs().max() + 1e-9, name


@pytest.mark.parametrize("items", [None, 40])
def test_the_loss_of_an_evaluation_is_by_the_labels_that_the_trainer_counts(
    items: int | None,
) -> None:
    """Transformers' Trainer counts them in evaluation from release 5 on."""
    given = batch(2, seqlen=24)
    given["labels"][:, 3:15] = -100
    wanted = build("llama", "sdpa", {}).eval()(**given, num_items_in_batch=items).loss

    def evaluate(model: Any, _: Any) -> torch.Tensor:
        return model.eval()(**given, num_items_in_batch=items).loss.detach()

    for loss in hooked("llama", evaluate):
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)


def test_documents_of_any_length_are_put_together_again() -> None:
    given = batch(seqlen=24)
    borders, alone = (0, 5, 16, 24), build("llama", "sdpa", {})
    documents = zip(borders, borders[1:], strict=False)
    wanted = torch.cat([alone(given["input_ids"][:, a:b]).logits for a, b in documents], 1)
    positions = torch.cat([torch.arange(n) for n in (5, 11, 8)])[None]

    def evaluate(model: Any, _: Any) -> torch.Tensor:
        return model.eval()(**given, position_ids=positions).logits.detach()

    assert_close(hooked("llama", evaluate, "document_zigzag")[0], wanted, "logits")


class Loss(torch.nn.Module):
    """A wrapper that returns its model's loss."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, **words: Any) -> torch.Tensor:
        return self.inner(input_ids, **words).logits.mean()


class Narrow(Loss):
    """Another, that passes nothing on."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return self.inner(input_ids, labels=labels).loss


SPANS = {"start_positions": IDS[:, 0] * 0, "end_positions": IDS[:, 0] * 0}


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (tf.LlamaModel, {"labels": IDS}, "none of transformers' causal or masked"),
        (tf.LlamaForQuestionAnswering, {**SPANS, "attention_mask": (IDS > 9).long()}, "one length"),
        (tf.LlamaForSequenceClassification, {"output_hidden_states": True}, "output_hidden_states"),
        (tf.LlamaForSequenceClassification, {"return_dict": False}, "return_dict=False"),
        (tf.LlamaModel, {}, r"returns \['last_hidden_state'\].*must return \"logits\""),
        (tf.LlamaForCausalLM, {"output_hidden_states": True}, "output_hidden_states=True"),
        (tf.LlamaForCausalLM, {"logits_to_keep": 1}, "logits_to_keep.*on one process"),
        (tf.LlamaForCausalLM, {"output_router_logits": True}, "output_router_logits"),
        (lambda config: Loss(tf.LlamaForCausalLM(config)), {}, "returns a Tensor"),
        (lambda config: Narrow(tf.LlamaForCausalLM(config)), {}, "forward takes no position_ids"),
    ],
)
def test_what_whole_batches_cannot_be_cut_for(
    make: Any, words: dict[str, Any], message: str
) -> None:
    def refused(model: Any, _: Any) -> None:
        with pytest.raises((NotImplementedError, ValueError), match=message):
            model(IDS, **words)

    def rank(comm: Any) -> None:
        config = tf.LlamaConfig(**LLAMA, pad_token_id=0)
        with_hooks(make(config), sequence_parallel(comm), refused)

    run_threads(2, rank)


def test_the_door_puts_back_what_it_swapped() -> None:
    kind = accelerate.Accelerator
    before = deepspeed.initialize, kind.prepare_data_loader, kind.gather_for_metrics
    with pytest.raises(ZeroDivisionError), wf_deepspeed.opened():
        assert deepspeed.initialize is not before[0]
        assert kind.prepare_data_loader is not before[1]
        assert kind.gather_for_metrics is not before[2]
        raise ZeroDivisionError
    assert (deepspeed.initialize, kind.prepare_data_loader, kind.gather_for_metrics) == before


def test_without_a_script_there_is_a_usage_line() -> None:
    with pytest.raises(AssertionError, match=r"usage: python -m wf_deepspeed .* 'nowhere.py'"):
        run_ranks(["-m", "wf_deepspeed", "nowhere.py"], 1)


def test_the_deepspeed_launchers_local_rank_goes_to_the_script() -> None:
    for given in (["--local_rank=3", "train.py", "-x"], ["train.py", "--local_rank=3", "-x"]):
        assert script_first(given) == ["train.py", "--local_rank=3", "-x"]
    assert script_first([]) == []


def test_a_timeout_before_the_script_is_ours() -> None:
    rest = ["--local_rank=3", "train.py", "-x"]
    assert take_timeout(["--local_rank=3", "--timeout=7.5", "train.py", "-x"]) == (7.5, rest)
    assert take_timeout(["train.py", "-x", "--timeout=3"])[1] == ["train.py", "-x", "--timeout=3"]
    assert take_timeout([]) == (600.0, [])


@pytest.mark.parametrize("name", ["config", "config_params", "args"])
def test_batch_sizes_counted_over_ranks_are_counted_over_groups(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever the configuration is given, DeepSpeed gets it once."""
    world = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 4)
    monkeypatch.setattr(unmodified, "dist", world)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    config = {**sizes, "train_batch_size": 24, "wallfacer": RING}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    args = Namespace(deepspeed_config=str(path), local_rank=1)
    given = {"args": args} if name == "args" else {"args": None, name: config}
    call = {**given, **unmodified.with_group_batch_size(given)}
    assert call["config" if name == "args" else name] == config | {"train_batch_size": 12}
    if name == "args":
        assert call["args"] == Namespace(deepspeed_config=None, local_rank=1)
        assert args.deepspeed_config == str(path)
    groups = config | {"train_batch_size": 12}
    assert unmodified.with_group_batch_size({"config": groups}) == {}
