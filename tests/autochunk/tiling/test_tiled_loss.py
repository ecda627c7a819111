"""Logits and loss computed tile by tile: loss and gradients equal those of all logits at once.

The reference is the same model without tiles, in float64. Tests that use the fixture `kernel` run
with torch's `linear_cross_entropy`, and with our own products as in a torch that has none.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.autochunk.tiling.decoder import VOCABULARY, Decoder, build_decoder
from tests.autochunk.tiling.helpers import ForCausalLMLoss, assert_close, tiled_modules
from wf_backends.autochunk.tiling import Tiles, tile_modules

BATCH, SEQLEN, NUM_TILES = 2, 13, 4
Batch = dict[str, Any]


def build_model(**kwargs: Any) -> Decoder:
    return build_decoder(layers=1, **kwargs).double()


def make_batch() -> Batch:
    ids = torch.randint(VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100  # tiles differ in how many labels they have; some have none
    return {"ids": ids, "labels": labels}


def head_tiles(num_tiles: int = NUM_TILES) -> list[Tiles]:
    return [Tiles("head", 1, num_tiles, loss=True)]


def loss_and_gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    model.zero_grad()
    loss = model(**batch)["loss"]
    (loss * 0.3).backward()  # a factor behind the loss must reach the gradients
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture(params=["linear_cross_entropy", "own products"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """torch's `linear_cross_entropy`, or our own products as in a torch that has none."""
    if request.param == "own products":
        monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    return request.param


LOSSES: dict[str, Batch] = {
    "mean": {},
    "sum over a given count": {"num_items_in_batch": 7},
    "another ignored label": {"ignore_index": 3, "labels": make_batch()["labels"].clamp(min=3)},
    "shifted labels": {"shift_labels": make_batch()["ids"].flip(1).contiguous()},
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("num_tiles", [1, NUM_TILES, 100])  # 100: more than tokens
def test_loss_and_gradients_equal_those_of_all_logits(
    loss: str, bias: bool, num_tiles: int
) -> None:
    model, batch = build_model(bias=bias), make_batch() | LOSSES[loss]
    expected = loss_and_gradients(model, batch)
    with tile_modules(model, head_tiles(num_tiles)):
        assert_close(loss_and_gradients(model, batch), expected)


class WithoutCount(Decoder):
    """As Phi4MultimodalForCausalLM of transformers 4.51."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        return super().forward(ids, labels)


def test_loss_is_divided_by_the_count_that_the_loss_function_is_given() -> None:
    model, batch = WithoutCount(layers=1).double(), make_batch() | {"num_items_in_batch": 7}
    expected = loss_and_gradients(model, batch)
    with tile_modules(model, head_tiles()):
        assert_close(loss_and_gradients(model, batch), expected)


@pytest.mark.usefixtures("kernel")
def test_batch_without_a_valid_label_has_the_loss_nan_and_gradients_of_0() -> None:
    """As of torch's cross entropy: in an accumulation such a micro-batch changes nothing."""
    batch = make_batch()
    batch["labels"][:] = -100
    model = build_model()
    with tile_modules(model, head_tiles()):
        loss, *grads = loss_and_gradients(model, batch)
    assert loss.isnan() and all(not grad.any() for grad in grads)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_head_that_is_tied_to_the_embedding(trained: bool) -> None:
    model = build_model()
    model.head.weight = model.embed.weight
    model.embed.weight.requires_grad_(trained)
    expected = loss_and_gradients(model, make_batch())
    with tile_modules(model, head_tiles()):
        assert_close(loss_and_gradients(model, make_batch()), expected)


@pytest.mark.parametrize("cast_after", [False, True], ids=["cast", "cast by an engine"])
def test_loss_of_a_bfloat16_model_is_float32(cast_after: bool) -> None:
    """Tolerances are those of bfloat16 parameters: 0.01 for the loss, 0.02 for gradients."""
    model = build_model()
    expected_loss, *expected_grads = loss_and_gradients(model, make_batch())
    model = model if cast_after else model.bfloat16()
    with tile_modules(model, head_tiles()):
        model.bfloat16()
        loss, *grads = loss_and_gradients(model, make_batch())
    assert loss.dtype == torch.float32
    assert_close([loss.double()], [expected_loss], 0.01)
    assert_close([grad.double() for grad in grads], expected_grads, 0.02)


def test_logits_are_computed_under_autocast() -> None:
    model = build_model().float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**make_batch())["loss"].detach()
        with tile_modules(model, head_tiles()):
            loss, *_ = loss_and_gradients(model, make_batch())
    assert_close([loss], [expected], 1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.usefixtures("kernel")
def test_no_tensor_has_all_logits() -> None:
    model = build_model()
    batch = {key: value.repeat(1, 20) for key, value in make_batch().items()}
    with LargestTensor() as untiled:
        loss_and_gradients(model, batch)
    assert untiled.numel == batch["ids"].numel() * VOCABULARY
    with tile_modules(model, head_tiles(8)), LargestTensor() as tiled:
        loss_and_gradients(model, batch)
    assert tiled.numel < untiled.numel / 4


def test_tiled_training_returns_no_logits() -> None:
    model = build_model()
    with tile_modules(model, head_tiles()):
        assert set(model(**make_batch())) == {"loss"}


def test_loss_is_computed_in_inference_mode() -> None:
    model = build_model()
    expected = model(**make_batch())["loss"].detach()
    with tile_modules(model, head_tiles()), torch.inference_mode():
        assert_close([model(**make_batch())["loss"]], [expected])


def test_call_without_labels_returns_logits() -> None:
    model, batch = build_model(), make_batch()
    expected = model(**batch)["logits"]
    with tile_modules(model, head_tiles()):
        assert torch.equal(model(batch["ids"])["logits"], expected)


def test_evaluation_returns_loss_and_logits() -> None:
    model, batch = build_model(), make_batch()
    expected = model(**batch)
    with tile_modules(model, head_tiles()):
        out = model.eval()(**batch)
    assert torch.equal(out["logits"], expected["logits"])
    assert torch.equal(out["loss"], expected["loss"])


def test_copy_of_a_tiled_model_computes_with_its_own_head() -> None:
    model, batch = build_model(), make_batch()
    expected = model(**batch)["loss"]
    with tile_modules(model, head_tiles()):
        copied = copy.deepcopy(model)
        nn.init.zeros_(copied.head.weight)
        assert not torch.equal(copied(**batch)["loss"], expected)
        torch.testing.assert_close(model(**batch)["loss"], expected)


def test_removing_tiles_restores_the_model() -> None:
    model, batch = build_model(), make_batch()
    expected = model(**batch)["logits"]
    with tile_modules(model, head_tiles()):
        assert tiled_modules(model)
    assert torch.equal(model(**batch)["logits"], expected)
    assert model.loss_function is ForCausalLMLoss and not tiled_modules(model)


def test_model_that_changes_its_logits_is_refused() -> None:
    model = build_model(scale=0.5)
    with (
        tile_modules(model, head_tiles()),
        pytest.raises(NotImplementedError, match="changes its logits before the loss"),
    ):
        model(**make_batch())


def test_labels_of_another_shape_are_refused() -> None:
    model, batch = build_model(), make_batch()
    with (
        tile_modules(model, head_tiles()),
        pytest.raises(ValueError, match=r"labels must be \(2, 13\), one for each row of the head"),
    ):
        model(batch["ids"], batch["labels"][:, :5])


def test_another_loss_function_is_refused_and_no_module_is_tiled() -> None:
    model = build_model()
    model.loss_function = F.cross_entropy
    with pytest.raises(NotImplementedError, match="loss of Decoder is cross_entropy, and not"):
        tile_modules(model, [Tiles("mlp.0", 1, 2), *head_tiles()])
    assert tiled_modules(model) == []
