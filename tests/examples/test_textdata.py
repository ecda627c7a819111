"""The text of examples/pretrain.py: documents packed into sequences, shuffled, split by rank."""

from itertools import islice
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import textdata

BEGIN = textdata.BEGIN


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """45 files: file i is the byte i, i + 1 times."""
    for index in range(45):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index]) * (index + 1))
    return textdata.find_files([str(tmp_path / "*.txt")])


def test_documents_are_packed_end_to_end() -> None:
    """Two sequences of 5 tokens; the third document stays for the next one."""
    documents = iter([[BEGIN, 1, 2], [BEGIN, 3, 4, 5, 6, 7], [BEGIN, 8]])
    first, second = textdata.pack(documents, 5)
    assert (list(first.tokens), first.borders) == ([BEGIN, 1, 2, BEGIN, 3], (0, 3, 5))
    assert (list(second.tokens), second.borders) == ([4, 5, 6, 7, BEGIN], (0, 4, 5))


def test_a_long_document_continues_in_the_next_sequence() -> None:
    packed = list(textdata.pack(iter([list(range(12))]), 5))
    assert [list(p.tokens) for p in packed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [p.borders for p in packed] == [(0, 5), (0, 5)]


def test_packing_reads_no_document_before_it_needs_it() -> None:
    def documents():
        yield [BEGIN, 1, 2, 3]
        raise AssertionError("read too far")

    assert next(textdata.pack(documents(), 4)).borders == (0, 4)


def test_shuffling_keeps_every_sequence_and_spreads_those_of_a_long_document() -> None:
    """200 sequences, shuffled 150 at a time: 100 of one document, 100 of a document each."""
    documents = [list(range(400)), *([i] * 4 for i in range(400, 500))]
    packed = list(textdata.pack(iter(documents), 4))
    shuffled = list(textdata.shuffle(iter(packed), 150, seed=0))
    assert shuffled != packed
    assert sorted(s.tokens for s in shuffled[:150]) == sorted(s.tokens for s in packed[:150])
    assert sorted(s.tokens for s in shuffled[150:]) == sorted(s.tokens for s in packed[150:])
    assert any(s.tokens[0] >= 400 for s in shuffled[:20]), "the long document still comes first"


def test_a_batch_has_token_ids_labels_and_borders() -> None:
    batch = textdata.PackedSequence([1, 2, 3], (0, 1, 3)).batch()
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3]]
    assert batch["cu_seqlens"] == (0, 1, 3)


def test_every_document_starts_at_a_border(files) -> None:
    for sequence in islice(textdata.sequences(files, 16, seed=3), 200):
        assert len(sequence.tokens) == 16
        assert sequence.borders[0] == 0 and sequence.borders[-1] == 16
        assert list(sequence.borders) == sorted(set(sequence.borders))
        begins = {i for i, token in enumerate(sequence.tokens) if token == BEGIN}
        assert begins <= set(sequence.borders)


def test_the_seed_determines_the_text(files) -> None:
    def take(seed: int) -> list:
        return list(islice(textdata.sequences(files, 16, seed), 20))

    assert take(1) == take(1) != take(2)


def test_the_parts_take_turns_behind_the_skipped_sequences(files) -> None:
    stream = list(islice(textdata.sequences(files, 16, seed=0), 12))
    parts = [list(islice(textdata.sequences(files, 16, 0, 4, part, 2), 4)) for part in range(2)]
    assert parts == [stream[4::2], stream[5::2]]


def test_files_are_for_training_or_held_out(files) -> None:
    training, held_out = textdata.split(files)
    assert len(held_out) == 2 and len(training) == 43
    assert not set(training) & set(held_out)


def test_a_single_file_is_for_training_and_held_out(tmp_path) -> None:
    path = tmp_path / "one.txt"
    assert textdata.split([path]) == ([path], [path])


def test_without_patterns_the_text_is_the_standard_library() -> None:
    files = textdata.find_files()
    assert len(files) > 500
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in files)


def test_a_pattern_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--data 'no/such/\*.txt' matches no file"):
        textdata.find_files(["no/such/*.txt"])


def test_files_without_a_byte_are_refused(tmp_path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="the 1 data files hold no byte"):
        next(textdata.sequences([tmp_path / "empty.txt"], 4, seed=0))
