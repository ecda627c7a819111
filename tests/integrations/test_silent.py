"""What would silently train to another result is found by `verify`, its own check taken out.

Each configuration runs twice: without the check or cure that it has, where `verify` names what
differs, and with it, where it trains, or is refused by that check. DSP's are in
tests/dsp/test_first_forward.py.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)
pytest.importorskip("accelerate", reason="accelerate is not installed", exc_type=ImportError)

import transformers as tf  # noqa: E402

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.deepspeed_jobs import run_ranks  # noqa: E402
from tests.integrations.silent_worker import inner_calls  # noqa: E402
from tests.integrations.transformers_models import (  # noqa: E402
    FAMILIES,
    batch,
    build,
    sequence_parallel,
)
from tests.integrations.verify_models import (  # noqa: E402
    DIFFERS,
    Convolution,
    TokenShift,
    llama,
    verify_on_ranks,
    vision_model,
)
from wf_transformers import (  # noqa: E402
    ModelOptions,
    WholeBatchHooks,
    attach_by,
    attach_model,
    attach_pretrained,
    forward_kwargs,
)
from wf_transformers.documents import Documents  # noqa: E402

WORKER = str(Path(__file__).with_name("silent_worker.py"))
MASK = "the output of model.layers.0.self_attn.o_proj is the first"
NOISE = "the output of model.embed_tokens is the first"
LOSS = "its loss is the first"

TRAINS = "^trained"
DDP: list[tuple[str, str, str]] = [
    ("mask", MASK, TRAINS),
    ("neftune", NOISE, TRAINS),
    ("entropy", LOSS, TRAINS),
    ("token_weights", LOSS, TRAINS),
    ("z_loss", LOSS, TRAINS),
    ("own_loss", LOSS, TRAINS),
    ("inner_call", MASK, "LlamaModel was called, and not the model around it"),
    ("padded_labels", LOSS, TRAINS),
]
ZERO = [
    ("mask", 1, MASK, TRAINS),
    ("neftune", 0, NOISE, TRAINS),
    ("entropy", 2, LOSS, TRAINS),
    ("mask", 3, MASK, TRAINS),
    ("entropy", 3, LOSS, TRAINS),
]


def run(folder: Path, cases: list[list[Any]], *start: str) -> dict[str, str]:
    """What a Trainer's first step raised by case, on two ranks."""
    (folder / "cases.json").write_text(json.dumps(cases))
    run_ranks([*start, WORKER, str(folder)], 2)
    told = json.loads((folder / "found.json").read_text())
    return {json.dumps(case): text for case, text in zip(cases, told, strict=True)}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    names = [name for name, *_ in DDP] + ["like_draws"]
    cases = [[name, cured, None] for name in names for cured in (False, True)]
    cases += [["dropout", True, None, verify] for verify in ("strict", False)]
    return run(tmp_path_factory.mktemp("ddp"), cases)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed", exc_type=ImportError)
    steps = [(name, zero) for name, zero, *_ in ZERO] + [("like_draws", 2)]
    cases = [[name, cured, zero] for name, zero in steps for cured in (False, True)]
    cases += [["dropout", True, 2, verify] for verify in ("strict", False)]
    return run(tmp_path_factory.mktemp("zero"), cases, "-m", "wf_deepspeed")


@pytest.mark.processes
@pytest.mark.parametrize("zero", [None, 2])
def test_a_step_is_as_without(zero: int | None, request: pytest.FixtureRequest) -> None:
    """Its loss and the norm of its gradient, to the last digit, under dropout."""
    told = request.getfixturevalue("trainers" if zero is None else "engines")
    compared, plain = (told[json.dumps(["dropout", True, zero, v])] for v in ("strict", False))
    assert compared == plain
    assert_told(plain, TRAINS)


@pytest.mark.processes
@pytest.mark.parametrize("zero", [None, 2])
def test_ranks_that_drop_the_same(zero: int | None, request: pytest.FixtureRequest) -> None:
    """Of their own tokens, because all draw from one seed."""
    told = request.getfixturevalue("trainers" if zero is None else "engines")
    like, apart = (told[json.dumps(["like_draws", cured, zero])] for cured in (False, True))
    assert_told(like, "drops the same places of different tokens .* first in transformer.drop:")
    assert_told(apart, TRAINS)


def assert_told(text: str, where: str) -> None:
    assert re.search(where, text), text


@pytest.mark.processes
@pytest.mark.parametrize(("name", "where", "cured"), DDP)
def test_a_trainer(name: str, where: str, cured: str, trainers: dict[str, str]) -> None:
    assert_told(trainers[json.dumps([name, False, None])], f"{DIFFERS}: {where} that differs")
    assert_told(trainers[json.dumps([name, True, None])], cured)


@pytest.mark.processes
@pytest.mark.deepspeed
@pytest.mark.parametrize(("name", "zero", "where", "cured"), ZERO)
def test_an_unmodified_script_under_deepspeed(
    name: str, zero: int, where: str, cured: str, engines: dict[str, str]
) -> None:
    assert_told(engines[json.dumps([name, False, zero])], f"{DIFFERS}: {where} that differs")
    assert_told(engines[json.dumps([name, True, zero])], cured)


def whole_batches(original: Any, given: dict[str, Any], size: int = 2) -> None:
    """A step of a model that takes whole batches, on ranks that are threads, as a door has it."""

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)

        def attached() -> Any:
            handle = attach_model(model, sp)
            WholeBatchHooks(model, handle)
            return handle

        wf_transformers.verify(model, sp, attached, "strict", whole_batches=True)
        handle, _ = attach_by(ModelOptions(verify="strict"), model, sp, lambda: attached())
        model(**given).loss.backward()
        handle.remove()

    run_threads(size, rank)


def learned_scale() -> Any:
    """Scores are multiplied by a parameter."""
    model = build("llama", "eager", {}).float()
    for layer in model.model.layers:
        scale = layer.self_attn.scaling
        del layer.self_attn.scaling
        layer.self_attn.scaling = nn.Parameter(torch.tensor(scale))
    return model


def without_nan() -> Any:
    """A batch without labels counts as loss 0."""
    share = WholeBatchHooks._share
    return patch.object(WholeBatchHooks, "_share", lambda *args: share(*args).nan_to_num(0.0))


def all_operations() -> Any:
    """Every rank counts the operations of the whole batch."""
    return patch.object(wf_transformers.Handle, "share_operations", lambda _, model: None)


def numbers_only() -> Any:
    function = "wf_backends.parallel.softmax._scale"
    return patch(function, lambda scale, _: float(torch.as_tensor(scale).detach()))


def untold_labels() -> Any:
    return patch.object(wf_transformers.Handle, "without_padded_labels", lambda _, x: dict(x))


PADDED = batch(2, 24, attention_mask=(torch.arange(24) < 17).long().expand(2, -1))
LLAMA = partial(build, "llama", "sdpa", {})
WHOLE: list[tuple[Callable[[], Any], Any, Callable[[], Any], str, str]] = [
    (LLAMA, batch(2), without_nan, "its loss without labels", TRAINS),
    (lambda: build("bert", "sdpa", {}), PADDED, untold_labels, "its loss", TRAINS),
    (
        learned_scale,
        batch(),
        numbers_only,
        "the gradient of model.layers.0.self_attn.scaling",
        "softmax_scale must be a number",
    ),
]
if hasattr(tf.PreTrainedModel, "floating_point_ops"):  # until transformers 5
    operations = "its floating_point_ops"
    WHOLE += [(LLAMA, batch(), all_operations, operations, TRAINS)]


@pytest.mark.filterwarnings("ignore:14 labels of this batch")
@pytest.mark.parametrize(("make", "given", "uncured", "where", "cured"), WHOLE)
def test_a_model_that_takes_whole_batches(
    make: Callable[[], Any], given: Any, uncured: Callable[[], Any], where: str, cured: str
) -> None:
    with uncured(), pytest.raises(NotImplementedError, match=f"{DIFFERS}: {where} is the first"):
        whole_batches(make().float(), given)
    with nullcontext() if cured == TRAINS else pytest.raises(ValueError, match=cured):
        whole_batches(make().float(), given)


RULE = "only attention may mix tokens|every rank would take its rows"


@pytest.mark.parametrize(
    ("make", "message", "rule"),
    [
        (Convolution, "the output of conv is the first", RULE),
        (lambda: llama(TokenShift), "the output of model.layers.0.input_layernorm is the", ""),
        *(
            (partial(vision_model, x), "no module of", RULE)
            for x in ("Dinov2", "DeiT", "SiglipVision")
        ),
    ],
)
def test_a_model_that_a_rule_refuses(make: Callable[[], Any], message: str, rule: str) -> None:
    """Mixing outside the Hugging Face model, and models that are never cut."""
    unchecked = patch.object(Documents, "check_rows", lambda *_: None)
    with unchecked, pytest.raises(NotImplementedError, match=message):
        verify_on_ranks(make)  # attaches by name, without a look at the model
    original = make().float()

    def rank(comm: Any) -> None:
        model = copy.deepcopy(original)
        attach_model(model, sequence_parallel(comm))
        if rule:
            model(pixel_values=torch.ones(1, 1, 8, 8))

    with pytest.raises(NotImplementedError, match=rule) if rule else nullcontext():
        run_threads(2, rank)


def call_inside(original: Any, whole: bool, *names: str, **more: Any) -> None:
    """A call of the model inside, in a loop of one's own, with these arguments alone."""
    given = batch(1, 24, **more)

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        words = ModelOptions(verify="strict")
        handle, _ = attach_by(words, model, sp, lambda: attach_model(model, sp))
        if whole:
            WholeBatchHooks(model, handle)
        local = given if whole else forward_kwargs(model, handle.shard_batch(given))
        for _ in range(2):
            model.base_model(**{name: local[name] for name in names or local})
        model(**local)
        handle.remove()

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("whole", "where", "cured"),
    [
        (False, "the output of rotary_emb", "LlamaModel was called without position_ids"),
        (True, "the output of layers.0.self_attn.o_proj", "and not the model around it"),
    ],
)
def test_a_model_inside_that_is_called_by_itself(whole: bool, where: str, cured: str) -> None:
    original = build("llama", "sdpa", {}).float()
    differs = f"{DIFFERS}: {where} is the first .* drawn batch, with input_ids alone as here"
    with inner_calls(), pytest.raises(NotImplementedError, match=differs):
        call_inside(original, whole, "input_ids")
    with pytest.raises((ValueError, NotImplementedError), match=cured):
        call_inside(original, whole, "input_ids")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_inside_that_is_called_as_it_should_be(family: str) -> None:
    original = build(family, "sdpa", {}).float()
    call_inside(original, False)
    if family in ("llama", "mistral"):  # which take documents as they are called
        call_inside(original, False, cu_seqlens=(0, 9, 24))


class Weighed(Convolution):
    """Cannot be run on a drawn batch; mixes neighbouring tokens."""

    def forward(self, input_ids: Tensor, weights: Tensor, **words: Any) -> Tensor:
        return super().forward(input_ids, **words) * weights[..., None]


@pytest.mark.parametrize("right", [False, True])
def test_a_part_is_compared_where_the_batch_is_cut(right: bool) -> None:
    """A model whose inputs cannot be drawn, with documents, in a loop of one's own."""
    original = Weighed().float()
    if right:
        original.conv = nn.Conv1d(61, 61, 1)
    given = batch(1, 40, weights=torch.rand(1, 40), cu_seqlens=(0, 9, 40))

    def rank(comm: Any) -> None:
        sp, model = sequence_parallel(comm), copy.deepcopy(original)
        handle, _ = attach_by(
            ModelOptions(verify="strict"),
            model,
            sp,
            lambda: attach_pretrained(wf_transformers.outermost(model), sp),
        )
        handle.shard_batch(given)

    refused = pytest.raises(NotImplementedError, match="the output of conv is the first")
    with nullcontext() if right else refused:
        run_threads(2, rank)
