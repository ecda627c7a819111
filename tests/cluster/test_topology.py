"""Topologies: files, presets, ranks that share a NIC, and contradictions to a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wf_backends.cluster.presets import PRESETS, load
from wf_backends.cluster.topology import check_job, from_dict, is_host_by_host

FILES = sorted((Path(__file__).parents[2] / "configs/topologies").iterdir())
RATE = {"forward_tflops": 0.02, "backward_tflops": 0.04, "call_us": 50}


def description(**changes: Any) -> dict[str, Any]:
    """A topology as a file describes it, with some keys changed."""
    return {
        "name": "lab",
        "hosts": 2,
        "ranks_per_host": 4,
        "nics_per_host": 2,
        "inside": {"latency_us": 20, "gigabits_per_s": 80},
        "between": {"latency_us": 50, "gigabits_per_s": 25},
        "kernels": {"sdpa": RATE},
        "memory_gib": 16,
    } | changes


def numbers(description: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers, by their path: {"inside.latency_us": 20, ...}."""
    by_path: dict[str, float] = {}
    for key, value in description.items():
        if isinstance(value, dict):
            by_path |= numbers(value, f"{prefix}{key}.")
        elif not isinstance(value, str):
            by_path[prefix + key] = value
    return by_path


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", True),
        ("aa", True),
        ("aabb", True),
        ("ab", True),
        ("aab", False),
        ("abab", False),
        ("aabbaa", False),
        ("abb", False),
    ],
)
def test_equal_numbers_of_neighbouring_ranks_per_host_are_host_by_host(
    hosts: str, expected: bool
) -> None:
    assert is_host_by_host(list(hosts)) == expected


def test_load_takes_as_many_hosts_as_the_ranks_need(tmp_path: Path) -> None:
    assert load("h100-8x400g", 128).hosts == 16 and load("one-host", 12).hosts == 1
    with pytest.raises(ValueError, match="12 ranks do not fill hosts of 8"):
        load("h100-8x400g", 12)
    path = tmp_path / "four.json"
    path.write_text(json.dumps(load("a100-4x-100gbe", 4).to_dict()))
    assert load(str(path), 2).size == 2
    with pytest.raises(ValueError, match="four.json: it has 4 ranks, but 8 share a sequence"):
        load(str(path), 8)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_configs_loads(path: Path) -> None:
    assert load(str(path)).size > 1


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_unchanged_by_json(name: str) -> None:
    preset = PRESETS[name]
    read = from_dict(json.loads(json.dumps(preset.to_dict())))
    assert numbers(read.to_dict()) == pytest.approx(numbers(preset.to_dict()))
    assert load(name) is preset


@pytest.mark.parametrize("name", ["h100-8x400g", "a100-4x-100gbe"])
def test_a_file_of_configs_equals_the_preset_of_its_name(name: str) -> None:
    path = next(path for path in FILES if path.stem == name.replace("-", "_"))
    assert numbers(load(str(path)).to_dict()) == pytest.approx(numbers(PRESETS[name].to_dict()))


def test_a_topology_is_in_seconds_bytes_and_flops() -> None:
    topology = from_dict(description())
    assert topology.between.seconds(25e9 / 8) == pytest.approx(1 + 50e-6)
    assert topology.between.seconds(0) == 0
    assert topology.rate("sdpa").forward_flops_per_s == pytest.approx(2e10)
    assert topology.memory_bytes == 16 * 2**30


def test_optional_keys_have_defaults_and_are_written_back() -> None:
    bare = from_dict(description())
    assert (bare.direct_links, bare.exchange_s) == (False, 0.0)
    assert (bare.occupied, bare.rate().diagonal_keys) == (0.0, 0.0)
    optional = {"direct_links": True, "exchange_us": 500, "occupied": 0.75}
    full = from_dict(description(**optional, kernels={"sdpa": RATE | {"diagonal_keys": 64}}))
    assert (full.direct_links, full.occupied, full.rate().diagonal_keys) == (True, 0.75, 64)
    assert full.exchange_s == pytest.approx(500e-6)
    assert from_dict(full.to_dict()) == full and from_dict(bare.to_dict()) == bare


def test_a_message_holds_a_rank_for_a_share_of_its_time_on_the_nearest_link() -> None:
    """Of the occupied share of a message's time (1 s + its latency), each of its ends has half."""
    two_links = from_dict(description(occupied=0.5))
    assert two_links.hold_s(1e10) == pytest.approx(0.25 * (1 + 20e-6))
    assert two_links.hold_s(0, messages=3) == pytest.approx(0.25 * 3 * 20e-6)
    one_rank_per_host = from_dict(description(occupied=0.5, ranks_per_host=1, nics_per_host=1))
    assert one_rank_per_host.hold_s(25e9 / 8) == pytest.approx(0.25 * (1 + 50e-6))
    assert from_dict(description()).hold_s(1e9) == 0


def test_neighbouring_ranks_share_a_nic() -> None:
    topology = from_dict(description())
    assert [topology.host(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [topology.nic(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("size", "hosts", "ranks", "nics"), [(16, 4, 4, 2), (8, 2, 4, 2), (2, 1, 2, 1), (1, 1, 1, 1)]
)
def test_with_ranks_adds_hosts_or_takes_a_part_of_one(
    size: int, hosts: int, ranks: int, nics: int
) -> None:
    topology = from_dict(description()).with_ranks(size)
    assert topology.size == size
    assert (topology.hosts, topology.ranks_per_host, topology.nics_per_host) == (hosts, ranks, nics)


def test_ranks_that_do_not_fill_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks do not fill hosts of 4.*multiple of 4"):
        from_dict(description()).with_ranks(6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hosts": 0}, "'hosts' must be a positive integer, got 0"),
        ({"hosts": True}, "'hosts' must be a positive integer, got True"),
        ({"nics_per_host": 3}, "nics_per_host must divide ranks_per_host 4.*got 3"),
        ({"memory_gib": -1}, "'memory_gib' must be a positive number, got -1"),
        ({"inside": {"latency_us": 1}}, "inside: 'gigabits_per_s' is missing"),
        ({"inside": 5}, "inside must be an object.*got 5"),
        ({"between": {"latency_us": 0, "gigabits_per_s": 1}}, "'between.latency_us' must be"),
        ({"kernels": {}}, "kernels must name at least one"),
        ({"kernels": 3}, "kernels must be an object with the keys .*, got 3"),
        ({"kernels": {"sdpa": {"forward_tflop": 1}}}, "forward_tflop'; did you mean 'forward_tfl"),
        ({"direct_links": "yes"}, "'direct_links' must be true or false, got 'yes'"),
        ({"occupied": 1.5}, "occupied must be a share, from 0 to 1, got 1.5"),
        ({"occupied": "half"}, "'occupied' must be a positive number or 0, got 'half'"),
        ({"kernels": {"sdpa": RATE | {"diagonal_keys": -1}}}, "'kernels.sdpa.diagonal_keys' must"),
        ({"exchange_us": -1}, "'exchange_us' must be a positive number or 0, got -1"),
        ({"name": None}, "'name' must be a string, got None"),
        ({"name": ["lab"]}, "'name' must be a string, got \\['lab'\\]"),
        ({"memory_gib": 10**400}, "'memory_gib' must be from 1e-30 to 1e\\+30, got 1000000"),
        ({"exchange_us": 10**400}, "'exchange_us' must be from 1e-30 to 1e\\+30 or 0, got 1000"),
        (
            {"inside": {"latency_us": 1, "gigabits_per_s": 1e-320}},
            "'inside.gigabits_per_s' must be",
        ),
        ({"hosts": 10**400}, "'hosts' must be at most 1000000, got 1000"),
        ({"kernels": {"flahs": RATE}}, "kernels: unknown key 'flahs'; did you mean 'flash'"),
        ({"host": 2}, "unknown key 'host'; did you mean 'hosts'"),
        ({"q_ranges": []}, r"unknown key 'q_ranges' \(known keys: \['name', 'hosts'"),
    ],
)
def test_a_wrong_key_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(description(**changes))


def test_a_topology_is_an_object() -> None:
    with pytest.raises(ValueError, match=r"topology must be an object.*got \[1\]"):
        from_dict([1])  # type: ignore[arg-type]


def test_a_missing_key_is_named() -> None:
    incomplete = description()
    del incomplete["between"]
    with pytest.raises(ValueError, match="'between' is missing"):
        from_dict(incomplete)


def test_an_error_names_the_file_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(description(hosts=0)))
    with pytest.raises(ValueError, match="mine.json: topology key 'hosts'"):
        load(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"hosts": 2, "hosts": 4}', "key 'hosts' is given twice: 2 and 4"),
        (
            '{"inside": {"latency_us": 1, "latency_us": 2}}',
            "key 'latency_us' is given twice: 1 and",
        ),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_an_error_names_a_file_that_is_not_json(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"mine.json: .*{message}"):
        load(str(path))


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="topology must be one of .* file that exists"):
        load("x" * 5000 + ".json")


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'h100-8x400g'"):
        load("h100-8x400")


def test_an_unknown_kernel_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"has rates for \['sdpa'\], got kernel 'spda'.*sdpa"):
        from_dict(description()).rate("spda")


def test_a_topology_that_fits_the_job_is_returned() -> None:
    topology = from_dict(description())
    assert check_job(topology, ["a"] * 4 + ["b"] * 4) is topology


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a"] * 4 + ["b"] * 3, "2 hosts x 4 ranks = 8, the job 7 ranks"),
        (["a"] * 8, "it has 2 hosts, the job 1"),
        (["a", "b"] * 4, "ranks 0 and 1 should share host 0, but run on 'a' and 'b'"),
        (["a"] * 3 + ["b"] * 5, "ranks 0 and 3 should share host 0"),
    ],
)
def test_a_topology_that_contradicts_the_job_is_refused(hosts: list[str], message: str) -> None:
    topology = from_dict(description())
    with pytest.raises(ValueError, match=f"contradicts the job.*{message}.*bench-links"):
        check_job(topology, hosts)
