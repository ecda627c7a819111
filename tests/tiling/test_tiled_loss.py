"""Logits and loss by parts: the loss and the gradients are those of the whole logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from wf_backends.tiling import Tiles, tile_modules

VOCABULARY, WIDTH, BATCH, SEQLEN, TILES = 40, 8, 2, 13, 4
Given = dict[str, Any]


def ForCausalLMLoss(  # noqa: N802 - transformers' name, and what it computes, in the logits' dtype
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    words: Given = {"ignore_index": ignore_index, "reduction": reduction}
    loss = F.cross_entropy(logits.view(-1, vocab_size), shift_labels.reshape(-1), **words)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Causal(nn.Module):
    """The form of Hugging Face's causal language models."""

    def __init__(self, bias: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        self.scale, self.loss_function = scale, ForCausalLMLoss

    def forward(self, ids: Tensor, labels: Tensor | None = None, **words: Any) -> Given:
        logits = self.head(self.inner(self.embed(ids)).tanh())
        if self.scale is not None:
            logits = logits * self.scale
        if labels is None:
            return {"logits": logits}
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY, **words)
        return {"loss": loss, "logits": logits}


def model_of(**words: Any) -> Causal:
    torch.manual_seed(0)
    return Causal(**words).double()


def batch() -> Given:
    ids = torch.randint(VOCABULARY, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100  # tiles differ in how many labels they have; some have none
    return {"ids": ids, "labels": labels}


def losses(model: nn.Module, given: Given) -> list[Tensor]:
    """The loss, and its gradients."""
    model.zero_grad()
    loss = model(**given)["loss"]
    (loss * 0.3).backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[Tensor], right: list[Tensor], tolerance: float = 1e-12) -> None:
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@contextmanager
def without_torchs_own() -> Iterator[None]:
    """As in a torch that has no `linear_cross_entropy`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(F, "linear_cross_entropy", raising=False)
        yield


WORDS: dict[str, Given] = {
    "mean": {},
    "sum over the caller's count": {"num_items_in_batch": 7},
    "another label to ignore": {"ignore_index": 3},
    "labels that were shifted": {"shift_labels": batch()["ids"].flip(1).contiguous()},
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients(name: str, bias: bool) -> None:
    model, given = model_of(bias=bias), batch() | WORDS[name]
    given["labels"] = given["labels"].clamp(min=3) if "ignore" in name else given["labels"]
    right = losses(model, given)
    for tiles in (1, TILES, 100):
        for torchs in (nullcontext(), without_torchs_own()):
            with torchs, tile_modules(model, [Tiles("head", 1, tiles, loss=True)]):
                same(losses(model, given), right)


def test_tied_and_frozen_heads() -> None:
    for own in (True, False):
        model = model_of()
        model.head.weight = model.embed.weight
        model.embed.weight.requires_grad_(own)
        right = losses(model, batch())
        for torchs in (nullcontext(), without_torchs_own()):
            with torchs, tile_modules(model, [Tiles("head", 1, TILES, loss=True)]):
                same(losses(model, batch()), right)


def test_a_loss_in_16_bits_is_a_float32() -> None:
    model = model_of()
    right = losses(model, batch())
    model.bfloat16()
    with tile_modules(model, [Tiles("head", 1, TILES, loss=True)]):
        loss, *grads = losses(model, batch())
    assert loss.dtype == torch.float32
    same([loss.double()], right[:1], 0.01)
    same([g.double() for g in grads], right[1:], 0.02)


def test_autocast_counts_for_the_logits() -> None:
    model = model_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        right = model(**batch())["loss"]
        with tile_modules(model, [Tiles("head", 1, TILES, loss=True)]):
            found = losses(model, batch())[0]
    same([found], [right.detach()], 1e-6)


class Largest(TorchDispatchMode):
    """The largest tensor that was made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return out


@pytest.mark.parametrize("own", [False, True])
def test_there_are_never_all_logits(own: bool) -> None:
    model, given = model_of(), batch()
    given = {k: v.repeat(1, 20) for k, v in given.items()}
    with Largest() as whole:
        losses(model, given)
    assert whole.numel == given["ids"].numel() * VOCABULARY
    torchs = without_torchs_own() if own else nullcontext()
    with torchs, tile_modules(model, [Tiles("head", 1, 8, loss=True)]), Largest() as tiled:
        losses(model, given)
    assert tiled.numel < whole.numel / 4


def test_evaluation_and_calls_without_labels_have_their_logits() -> None:
    model, given = model_of(), batch()
    right = model(**given)
    with tile_modules(model, [Tiles("head", 1, TILES, loss=True)]):
        assert set(model(**given)) == {"loss"}
        assert torch.equal(model(given["ids"])["logits"], right["logits"])
        found = model.eval()(**given)
        assert torch.equal(found["logits"], right["logits"])
        assert torch.equal(found["loss"], right["loss"])
        twin = copy.deepcopy(model).train()
        nn.init.zeros_(twin.head.weight)
        assert not torch.equal(twin(**given)["loss"], right["loss"])
    assert torch.equal(model.train()(**given)["logits"], right["logits"])
    assert model.loss_function is ForCausalLMLoss and "forward" not in vars(model.head)


def test_a_model_that_changes_its_logits_is_refused() -> None:
    model = model_of(scale=0.5)
    with (
        tile_modules(model, [Tiles("head", 1, TILES, loss=True)]),
        pytest.raises(NotImplementedError, match="changes its logits before the loss"),
    ):
        model(**batch())


def test_wrong_labels_and_other_losses_are_refused() -> None:
    model, given = model_of(), batch()
    with (
        tile_modules(model, [Tiles("head", 1, TILES, loss=True)]),
        pytest.raises(ValueError, match=r"labels must be \(2, 13\), one for each row of the head"),
    ):
        model(given["ids"], given["labels"][:, :5])
    model.loss_function = F.cross_entropy
    with pytest.raises(NotImplementedError, match="loss of Causal is cross_entropy, and not"):
        tile_modules(model, [Tiles("inner", 1, 2), Tiles("head", 1, TILES, loss=True)])
    assert "forward" not in vars(model.inner)
