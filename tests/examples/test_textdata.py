"""The example's text: streamed, packed, never across documents, the same on every rank."""

from itertools import islice
from pathlib import Path

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(Path(__file__).parents[2] / "examples")
    import textdata

BEGIN = textdata.BEGIN


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for index in range(45):
        (tmp_path / f"{index:02}.txt").write_bytes(bytes([index]) * (index + 1))
    return textdata.find_files([str(tmp_path / "*.txt")])


def test_documents_are_laid_end_to_end() -> None:
    documents = iter([[BEGIN, 1, 2], [BEGIN, 3, 4, 5, 6, 7], [BEGIN, 8]])
    first, second = textdata.pack(documents, 5)
    assert (list(first.tokens), first.borders) == ([BEGIN, 1, 2, BEGIN, 3], (0, 3, 5))
    assert (list(second.tokens), second.borders) == ([4, 5, 6, 7, BEGIN], (0, 4, 5))


def test_a_document_longer_than_several_sequences_goes_on() -> None:
    packed = list(textdata.pack(iter([list(range(12))]), 5))
    assert [list(p.tokens) for p in packed] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert [p.borders for p in packed] == [(0, 5), (0, 5)]


def test_packing_reads_no_further_than_it_must() -> None:
    def documents():
        yield [BEGIN, 1, 2, 3]
        raise AssertionError("read too far")

    assert next(textdata.pack(documents(), 4)).borders == (0, 4)


def test_mixing_keeps_every_sequence_and_parts_those_of_a_long_file() -> None:
    packed = list(textdata.pack(iter([list(range(400)), *([i] * 4 for i in range(400, 500))]), 4))
    mixed = list(textdata.shuffle(iter(packed), 150, seed=0))
    assert mixed != packed
    assert sorted(s.tokens for s in mixed[:150]) == sorted(s.tokens for s in packed[:150])
    assert sorted(s.tokens for s in mixed[150:]) == sorted(s.tokens for s in packed[150:])
    assert any(s.tokens[0] >= 400 for s in mixed[:20]), "the long file still comes first"


def test_a_batch_is_what_shard_batch_takes() -> None:
    batch = textdata.PackedSequence([1, 2, 3], (0, 1, 3)).batch()
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[1, 2, 3]]
    assert batch["cu_seqlens"] == (0, 1, 3)


def test_borders_always_cover_the_sequence(files) -> None:
    for sequence in islice(textdata.sequences(files, 16, seed=3), 200):
        assert len(sequence.tokens) == 16
        assert sequence.borders[0] == 0 and sequence.borders[-1] == 16
        assert list(sequence.borders) == sorted(set(sequence.borders))
        starts = set(sequence.borders)
        assert all(i in starts for i, token in enumerate(sequence.tokens) if token == BEGIN)


def test_the_same_seed_gives_the_same_text_and_another_another(files) -> None:
    def take(seed: int) -> list:
        return list(islice(textdata.sequences(files, 16, seed), 20))

    assert take(1) == take(1) != take(2)


def test_parts_and_skips_divide_the_stream(files) -> None:
    whole = list(islice(textdata.sequences(files, 16, seed=0), 12))
    parts = [list(islice(textdata.sequences(files, 16, 0, 4, part, 2), 4)) for part in range(2)]
    assert parts == [whole[4::2], whole[5::2]]


def test_no_held_out_file_is_trained_on(files) -> None:
    training, held_out = textdata.split(files)
    assert len(held_out) == 2 and len(training) == 43
    assert not set(training) & set(held_out)


def test_a_single_file_is_used_for_both(tmp_path) -> None:
    path = tmp_path / "one.txt"
    assert textdata.split([path]) == ([path], [path])


def test_without_patterns_it_is_the_standard_library() -> None:
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
