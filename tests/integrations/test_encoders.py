"""Encoders of images, videos and sounds take whole batches, are cut inside, and are exact on ranks.

The reference is the same model on one device with transformers' own attention, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import wf_transformers  # noqa: E402
from tests.helpers import run_threads  # noqa: E402
from tests.integrations.encoder_models import ENCODERS, build  # noqa: E402
from tests.integrations.families import NoFloat32  # noqa: E402
from tests.integrations.results import Result, assert_means_are, run_backward  # noqa: E402
from tests.integrations.transformers_models import sequence_parallel  # noqa: E402

OUTPUTS = ("logits", "logits_per_text", "last_hidden_state")


def run(model: Any, batch: dict[str, Any]) -> Result:
    """The loss is the model's own if it has one."""
    with NoFloat32():
        output = model(**batch)
        rows = next(output[name] for name in OUTPUTS if name in output)
        predicted = output.get("predictor_output")
        if predicted is not None:
            rows = torch.cat([rows, predicted.last_hidden_state], dim=1)
        loss = output.get("loss")
        return run_backward(model, rows, rows.sin().mean() if loss is None else loss)


def run_attached(name: str, size: int, checkpointing: bool = False) -> list[Result]:
    models = [build(name) for _ in range(size)]

    def rank(comm: Any) -> Result:
        model = models[comm.rank]
        with wf_transformers.attach(model, sequence_parallel(comm), verify=False) as handle:
            if checkpointing:
                model.gradient_checkpointing_enable()
            wf_transformers.WholeBatchHooks(model, handle)  # as the Trainer calls it
            return run(model, ENCODERS[name].batch)

    return run_threads(size, rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ENCODERS)
def test_loss_and_gradients_are_exact(name: str, size: int) -> None:
    assert_means_are(run(build(name), ENCODERS[name].batch), run_attached(name, size))


@pytest.mark.parametrize("name", ENCODERS)
def test_recomputed_layers_are_exact(name: str) -> None:
    assert_means_are(run(build(name), ENCODERS[name].batch), run_attached(name, 2, True))


def test_random_masks_that_differ_between_ranks_are_refused() -> None:
    """Threads draw from torch's generator one after the other, processes from their own seeds."""
    models = [build("vit_mae") for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        wf_transformers.attach_model(model, sequence_parallel(comm))
        with pytest.raises(ValueError, match="gets other rows on each rank"):
            model(ENCODERS["vit_mae"].batch["pixel_values"])

    run_threads(2, rank)


def test_branches_that_are_left_out_for_a_sample_are_refused() -> None:
    models = [build("dinov2") for _ in range(2)]

    def rank(comm: Any) -> None:
        model = models[comm.rank]
        model.config.drop_path_rate = 0.1
        wf_transformers.attach_model(model, sequence_parallel(comm))
        with pytest.raises(NotImplementedError, match="drop_path_rate=0.1: every rank would leave"):
            model(**ENCODERS["dinov2"].batch)

    run_threads(2, rank)


def test_verify_passes_and_remove_undoes_all() -> None:
    """Also in MAE's decoder, whose layers have a config of their own."""
    models = [build("vit_mae").float() for _ in range(2)]
    batch = {key: x.float() for key, x in ENCODERS["vit_mae"].batch.items()}

    def rank(comm: Any) -> tuple[Tensor, Any]:
        sp, model = sequence_parallel(comm), models[comm.rank]
        attach = partial(wf_transformers.attach, model, sp, verify=False)
        report = wf_transformers.verify(model, sp, attach, "strict", batch=batch)
        return model(**batch).logits, report

    expected = build("vit_mae").float()(**batch).logits
    for logits, report in run_threads(2, rank):
        assert report is not None
        assert torch.equal(logits, expected)
