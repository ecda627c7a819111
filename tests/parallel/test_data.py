"""prepare_batch, before sharding: labels shifted, positions and documents, padding, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wf_backends.parallel.data import prepare_batch


def batch(size: int = 1, seqlen: int = 7, **tensors: Any) -> dict[str, Any]:
    """Tokens 10, 11, ... and their copy as labels; `tensors` are added."""
    ids = torch.arange(10, 10 + size * seqlen).view(size, seqlen)
    return {"input_ids": ids, "labels": ids.clone(), **tensors}


def valid_mask(*lengths: int, seqlen: int = 7) -> torch.Tensor:
    """attention_mask (samples, seqlen) of samples of these lengths."""
    return (torch.arange(seqlen)[None] < torch.tensor(lengths)[:, None]).long()


def test_labels_are_shifted_and_padding_is_a_document_of_its_own() -> None:
    out = prepare_batch(batch(), multiple=4, pad_token_id=3)
    assert out["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15, 16, 3]]
    assert out["labels"].tolist() == [[11, 12, 13, 14, 15, 16, -100, -100]]
    assert out["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 6]]
    assert out["cu_seqlens"] == (0, 7, 8)


def test_without_padding_there_are_no_documents() -> None:
    out = prepare_batch(batch(2, 8), multiple=4)
    assert "cu_seqlens" not in out and out["input_ids"].shape == (2, 8)
    assert out["position_ids"].tolist() == [list(range(8))] * 2


def test_documents_end_their_labels_and_restart_positions() -> None:
    out = prepare_batch(batch(2, cu_seqlens=[0, 3, 7]), multiple=8)
    assert out["labels"][0].tolist() == [11, 12, -100, 14, 15, 16, -100, -100]
    assert out["labels"][1].tolist() == [18, 19, -100, 21, 22, 23, -100, -100]
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 3]] * 2
    assert out["cu_seqlens"] == (0, 3, 7, 8)


def test_mask_of_equal_lengths_becomes_a_document() -> None:
    out = prepare_batch(batch(2, attention_mask=valid_mask(5, 5)), multiple=4)
    assert out["labels"][0].tolist() == [11, 12, 13, 14, -100, -100, -100, -100]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert out["cu_seqlens"] == (0, 5, 8)


def test_mask_shortens_the_last_document() -> None:
    original = batch(attention_mask=valid_mask(5), cu_seqlens=(0, 3, 6, 7))
    assert prepare_batch(original, multiple=1)["cu_seqlens"] == (0, 3, 5, 7)


def test_mask_of_ones_becomes_one_document() -> None:
    assert prepare_batch(batch(attention_mask=valid_mask(7)), multiple=7)["cu_seqlens"] == (0, 7)


def test_mask_of_different_lengths_is_kept_and_gives_no_documents() -> None:
    out = prepare_batch(batch(2, attention_mask=valid_mask(4, 7)), multiple=4)
    assert "cu_seqlens" not in out
    assert out["attention_mask"].sum(dim=1).tolist() == [4, 7]
    assert (out["labels"] != -100).sum(dim=1).tolist() == [3, 6]


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int32, torch.bool))
def test_labels_of_any_integer_dtype_become_int64(dtype: torch.dtype) -> None:
    """Tokens of a byte-level model may be uint8, which holds no -100."""
    out = prepare_batch(batch(labels=torch.ones(1, 7, dtype=dtype)), multiple=4)
    assert out["labels"].dtype == torch.int64
    assert out["labels"].tolist() == [[1, 1, 1, 1, 1, 1, -100, -100]]


def test_an_empty_batch_with_a_mask_is_padded() -> None:
    out = prepare_batch(batch(0, attention_mask=torch.ones(0, 7)), multiple=4)
    assert out["input_ids"].shape == (0, 8) and out["cu_seqlens"] == (0, 7, 8)


def test_labels_are_not_shifted_twice() -> None:
    original = batch(attention_mask=valid_mask(5), cu_seqlens=(0, 3, 7))
    out = prepare_batch(original, multiple=4, labels_are_shifted=True)
    assert out["labels"].tolist() == [[10, 11, 12, 13, 14, -100, -100, -100]]


def test_padding_has_the_last_position_of_the_user() -> None:
    out = prepare_batch(batch(position_ids=torch.arange(5, 12)[None]), multiple=4)
    assert out["position_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 11, 11]]


@pytest.mark.parametrize(
    "borders",
    [{"cu_seqlens": [0, 3, 7]}, {"cu_seqlens": [0, 7]}, {"attention_mask": valid_mask(3)}],
    ids=str,
)
def test_positions_of_the_user_may_restart_at_documents_and_padding(
    borders: dict[str, Any],
) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 0]])
    out = prepare_batch(batch(position_ids=positions, **borders), multiple=7)
    assert torch.equal(out["position_ids"], positions)


def test_other_tensors_are_padded_with_zeros_and_keep_their_dtype() -> None:
    original = batch(
        2, weights=torch.ones(2, 7, 3, dtype=torch.bfloat16), flag=valid_mask(7, 7).bool()
    )
    out = prepare_batch(original, multiple=4, pad_token_id=3)
    assert out["weights"].shape == (2, 8, 3) and out["weights"].dtype == torch.bfloat16
    assert out["weights"][:, 7].abs().sum() == 0
    assert out["flag"].dtype == torch.bool and not out["flag"][:, 7].any()


def test_inputs_embeds_replace_input_ids_and_none_is_dropped() -> None:
    out = prepare_batch({"inputs_embeds": torch.ones(2, 7, 4), "labels": None}, multiple=4)
    assert out["inputs_embeds"].shape == (2, 8, 4) and "labels" not in out


def test_prepare_batch_does_not_change_its_argument() -> None:
    original = batch(cu_seqlens=[0, 3, 7], attention_mask=valid_mask(5))
    before = {k: v.clone() if isinstance(v, torch.Tensor) else list(v) for k, v in original.items()}
    prepare_batch(original, multiple=7)
    assert all(
        torch.equal(v, before[k]) if isinstance(v, torch.Tensor) else v == before[k]
        for k, v in original.items()
    )


@given(
    cuts=st.sets(st.integers(1, 29), max_size=5),
    multiple=st.integers(1, 12),
    length=st.integers(1, 30),
)
def test_labels_are_the_next_tokens_of_each_document(
    cuts: set[int], multiple: int, length: int
) -> None:
    """The pairs (token, label) are those of neighbours in a document, both valid by the mask.

    The padded length, the borders and the positions at them fit, too.
    """
    borders = [0, *sorted(cuts), 30]
    original = batch(seqlen=30, cu_seqlens=borders, attention_mask=valid_mask(length, seqlen=30))
    out = prepare_batch(original, multiple=multiple)
    expected = [(t, t + 1) for t in range(10, 9 + length) if t - 9 not in borders]
    counted = out["labels"][0] != -100
    tokens, labels = (out[key][0][counted].tolist() for key in ("input_ids", "labels"))
    assert [*zip(tokens, labels, strict=True)] == expected
    padded = out["input_ids"].shape[1]
    assert padded % multiple == 0 and 30 <= padded < 30 + multiple
    assert out["cu_seqlens"][-1] == padded and length in out["cu_seqlens"]
    starts = [c for c in out["cu_seqlens"] if c < length]
    assert starts == [c for c in borders if c < length]
    assert all(out["position_ids"][0, c] == 0 for c in starts)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"attention_mask": valid_mask(5).flip(1)}, "attention_mask is padded on"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, "attention_mask has holes"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 0]])},  # numbers of documents
            r"attention_mask must be 1 .* got \[0, 1, 2\]: give packed documents as cu_seqlens",
        ),
        ({"attention_mask": valid_mask(0)}, "attention_mask holds no valid token"),
        ({"attention_mask": torch.ones(1, 1, 7, 7)}, r"attention_mask must .*\(1, 1, 7, 7\)"),
        ({"labels": torch.tensor([1])}, r"labels must be a tensor \(1, 7\), got \(1,\)"),
        ({"position_ids": torch.ones(3, 7)}, r"position_ids must be .*\(3, 7\)"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}, r"token 3.* \[0, 3, 7\]"),
        ({"extra": torch.ones(1, 6, 2)}, r"extra must be a tensor \(1, 7, ...\), got \(1, 6, 2\)"),
        ({"name": "text"}, "name must be a tensor .* got str"),
        ({"cu_seqlens": [0, 3, 8]}, "cu_seqlens must end at the sequence length 7, got 8"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "cu_seqlens must be host integers"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": torch.ones(1, 0), "labels": None}, "input_ids holds no token"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_batch({**batch(), **tensors}, multiple=4)


def test_samples_of_different_lengths_with_documents_are_refused() -> None:
    original = batch(2, attention_mask=valid_mask(4, 7), cu_seqlens=(0, 3, 7))
    with pytest.raises(ValueError, match=r"lengths \[4, 7\], but cu_seqlens \(0, 3, 7\)"):
        prepare_batch(original, multiple=4)


def test_a_multiple_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple must be at least 1 token, got 0"):
        prepare_batch(batch(), multiple=0)
