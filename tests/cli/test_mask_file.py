"""`--mask FILE`: a mask in slices for plan and explain, and the errors of a bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import SMALL, TWO_HOSTS
from tests.slices import block_causal, sliced

FRAMES = block_causal(1024, 8192)  # 8 frames


def write_mask(tmp_path: Path, content: object) -> str:
    path = tmp_path / "mask.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_plan_counts_slices(wallfacer_json, tmp_path) -> None:
    command = ["plan", *SMALL, "--topology", TWO_HOSTS, "--ranks", "4"]
    mask = ["--mask", write_mask(tmp_path, FRAMES)]
    plan, causal = wallfacer_json(*command, *mask), wallfacer_json(*command)
    assert "counted message by message" in plan["reason"]
    pairs = 1 + 1 / 8  # visible pairs of 8 block-causal frames / those of a causal mask
    assert plan["ring"]["compute_s"] == pytest.approx(pairs * causal["ring"]["compute_s"], rel=0.1)
    balanced = wallfacer_json(*command, *mask, "--layout", "balanced")
    assert balanced["plans"][0]["config"]["layout"] == "balanced"


def test_plan_hints_at_no_layout_that_does_not_fit_the_memory(wallfacer_json, tmp_path) -> None:
    slices = (0, 1953, 1789, 2933), (1953, 3965, 1140, 2308), (3965, 4096, 776, 1144)
    mask = write_mask(tmp_path, sliced(*((*ends, "full") for ends in slices)))
    heads = ["--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--seqlen", "4096"]
    command = ["plan", *heads, "--topology", "one-host", "--ranks", "4", "--mask", mask]
    least = {"contiguous": 0.00751, "balanced": 0.00778, "zigzag": 0.00787}  # GiB of a plan
    for layout, gib in least.items():
        plan = wallfacer_json(*command, "--layout", layout, "--memory-gib", str(gib + 1e-5))
        assert plan["plans"][0]["config"]["layout"] == layout
        assert (layout == "zigzag") == ("is faster" in plan["reason"])


def test_explain_shows_the_mask(wallfacer, tmp_path) -> None:
    mask = ["--mask", write_mask(tmp_path, FRAMES), "--layout", "balanced"]
    code, out, _ = wallfacer("explain", "ring", *SMALL, "--ranks", "4", *mask)
    assert code == 0
    assert "mask: 8 slices, 56.2% of all pairs of 8,192 tokens" in out
    assert "queries (1024, 2048) of keys (0, 2048), full" in out
    assert "layout balanced: the busiest rank has 0.0% more than the mean" in out


@pytest.mark.parametrize(
    ("content", "args", "message"),
    (
        ("{", [], "mask.json is not JSON"),
        ([1], [], "must be an object with the keys q_ranges, k_ranges, attn_mask_types, got list"),
        ("[" * 100_000, [], "mask.json is not JSON: maximum recursion depth"),
        ({"q_ranges": []}, [], "got ['q_ranges']"),
        ('{"q_ranges": [], "q_ranges": []}', [], "key 'q_ranges' is given twice: [] and []"),
        (FRAMES | {"causal": True}, [], "got ['attn_mask_types', 'causal', 'k_ranges', 'q_r"),
        (sliced((0, 9, 0, 9, "casual")), [], "mask.json: attn_mask_types must be of"),
        (sliced((5, 5, 0, 9, "full")), [], "mask.json: q_ranges[0] must be 0 <= start < stop"),
        (sliced((0, 9, 0, 9, "full"), (0, 2, 0, 2, "full")), [], "must not overlap: slice 0"),
        (sliced((0, 9000, 0, 9, "full")), [], "ends beyond the sequence of 8192 tokens"),
        (FRAMES, ["--window", "9"], "--mask already gives the whole mask: leave --window 9 out"),
        (FRAMES, ["--full"], "--mask already gives the whole mask: leave --full out"),
    ),
)
@pytest.mark.parametrize("command", (("plan",), ("explain", "ring")))
def test_a_bad_mask_is_refused(wallfacer, tmp_path, command, content, args, message) -> None:
    code, _, err = wallfacer(*command, *SMALL, "--mask", write_mask(tmp_path, content), *args)
    assert code == 2 and message in " ".join(err.split()), err


def test_a_missing_file_and_options_that_contradict_a_mask_are_refused(wallfacer) -> None:
    code, _, err = wallfacer("plan", *SMALL, "--mask", "nowhere.json")
    assert code == 2 and "--mask nowhere.json: cannot be read: No such file" in err
    code, _, err = wallfacer("plan", *SMALL, "--layout", "balanced")
    assert code == 2 and "--layout balanced needs --mask" in err
    code, _, err = wallfacer("plan", *SMALL, "--mask", "mask.json", "--documents", "64")
    assert code == 2 and "leave --documents 64 out" in err
