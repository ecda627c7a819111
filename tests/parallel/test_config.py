"""SequenceParallelConfig: to and from a dict, values that follow from others, refusals by name."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from wf_backends import SequenceParallelConfig

CONFIG = {
    "sequence_parallel_size": 8,
    "route": {"name": "concentric", "team_size": 2},
    "backward_route": None,
    "backward_moves": "keys",
    "ulysses_degree": 1,
    "layout": "zigzag",
    "kernel": "auto",
}


def test_to_dict_returns_what_from_dict_read():
    config = SequenceParallelConfig.from_dict(CONFIG)
    assert config.to_dict() == CONFIG
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(SequenceParallelConfig.from_dict(CONFIG)) == hash(config)


@pytest.mark.parametrize(
    ("options", "stride", "degrees"),
    (
        ({}, "auto", (1, 2, 4, 8)),
        ({"ulysses_stride": "auto"}, "auto", (1, 2, 4, 8)),
        ({"ulysses_stride": 1}, 1, (1, 2, 4, 8)),
        ({"ulysses_stride": 2}, 2, (2, 4)),
        ({"ulysses_stride": 4}, 4, (2,)),
        ({"ulysses_degree": 2}, 1, (2,)),
        ({"ulysses_degree": 2, "ulysses_stride": 4}, 4, (2,)),
        ({"ulysses_degree": 2, "ulysses_stride": "auto"}, "auto", (2,)),
        ({"route": "ring"}, 1, (1,)),
        ({"route": "ring", "ulysses_degree": "auto"}, "auto", (1, 2, 4, 8)),
        ({"route": "ring", "ulysses_degree": 2, "ulysses_stride": "auto"}, "auto", (2,)),
    ),
)
def test_stride_is_chosen_unless_named_and_limits_the_degrees(options, stride, degrees):
    config = SequenceParallelConfig(sequence_parallel_size=8, **options)
    assert (config.ulysses_stride, config.degrees) == (stride, degrees)
    assert config.leaves_open == (options.get("route") is None or stride == "auto")
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    default = "auto" if config.ulysses_degree == "auto" else 1
    assert ("ulysses_stride" in config.to_dict()) == (stride != default)


@pytest.mark.parametrize(
    ("options", "chunks"),
    (
        ({}, "auto"),
        ({"ulysses_chunks": 2}, 2),
        ({"ulysses_degree": 2}, 1),
        ({"ulysses_degree": 2, "ulysses_chunks": 4}, 4),
        ({"ulysses_degree": 2, "ulysses_chunks": "auto"}, "auto"),
        ({"route": "ring", "ulysses_degree": "auto"}, "auto"),
        ({"route": "ring", "ulysses_chunks": 1}, 1),
    ),
)
def test_chunks_are_chosen_where_the_degree_is_unless_named(options, chunks):
    config = SequenceParallelConfig(sequence_parallel_size=8, **options)
    assert config.ulysses_chunks == chunks
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    default = "auto" if config.ulysses_degree == "auto" else 1
    assert ("ulysses_chunks" in config.to_dict()) == (chunks != default)


def test_one_chunk_beside_a_named_route_leaves_nothing_open():
    config = SequenceParallelConfig(sequence_parallel_size=8, route="ring", ulysses_chunks=1)
    assert not config.leaves_open


@pytest.mark.parametrize("source", ("measure", "h100-8x400g", "mine.json", "a/b.toml"))
def test_to_dict_returns_the_topology_unless_it_is_the_default(source):
    config = SequenceParallelConfig(sequence_parallel_size=4, topology=source)
    assert config.to_dict()["topology"] == source
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    assert "topology" not in SequenceParallelConfig().to_dict()


@pytest.mark.parametrize(
    ("options", "degree", "moves", "degrees"),
    (
        ({}, "auto", "auto", (1, 2, 4, 8)),
        ({"route": "auto", "ulysses_degree": 1}, 1, "auto", (1,)),
        ({"ulysses_degree": 4, "backward_moves": "keys"}, 4, "keys", (4,)),
        ({"route": {"name": "all_gather", "host_size": 4}}, 1, "queries", (1,)),
        ({"route": {"name": "all_gather", "host_size": 1}}, 1, "keys", (1,)),
        (
            {"route": {"name": "all_gather", "host_size": 4}, "ulysses_degree": "auto"},
            "auto",
            "queries",
            (1, 2, 4),
        ),
        ({"route": "ring"}, 1, "keys", (1,)),
        ({"route": "ring", "backward_route": "auto"}, 1, "auto", (1,)),
        ({"backward_route": "ring"}, 1, "keys", (1,)),
        ({"route": "ring", "ulysses_degree": "auto"}, "auto", "keys", (1, 2, 4, 8)),
        (
            {"route": {"name": "concentric", "team_size": 2}, "ulysses_degree": "auto"},
            "auto",
            "keys",
            (1, 2),
        ),
        ({"strategy": "lss"}, 1, "keys", (1,)),
    ),
)
def test_degree_and_direction_follow_from_the_routes_unless_named(options, degree, moves, degrees):
    config = SequenceParallelConfig(sequence_parallel_size=8, **options)
    assert (config.ulysses_degree, config.backward_moves, config.degrees) == (
        degree,
        moves,
        degrees,
    )
    assert config.leaves_open == ("auto" in (config.route, config.backward_route, degree, moves))
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config


def test_config_and_its_routes_are_frozen():
    config = SequenceParallelConfig.from_dict(CONFIG)
    with pytest.raises(FrozenInstanceError):
        config.layout = "contiguous"  # pyright: ignore
    with pytest.raises(TypeError):
        config.route["team_size"] = 1  # pyright: ignore


def test_the_order_of_a_routes_keys_does_not_matter():
    """Ranks compare configs by their repr."""
    routes = ({"rows": 2, "cols": 4, "name": "mesh"}, {"name": "mesh", "cols": 4, "rows": 2})
    first, second = (SequenceParallelConfig(sequence_parallel_size=8, route=r) for r in routes)
    assert repr(first) == repr(second)


def test_a_placement_from_json_is_read_and_returned():
    placement = {"name": "concentric", "team_size": 2, "order": [2, 0, 1]}
    options = {**CONFIG, "route": placement, "backward_route": {"name": "ring"}}
    config = SequenceParallelConfig.from_dict(options)
    assert config == SequenceParallelConfig.from_dict(json.loads(json.dumps(options)))
    assert config.to_dict() == options
    assert pickle.loads(pickle.dumps(config)) == config != SequenceParallelConfig.from_dict(CONFIG)
    assert hash(config) == hash(SequenceParallelConfig.from_dict(options))
    placement["order"][0] = 7  # the config has its own copy
    assert config.route["order"] == (2, 0, 1)  # pyright: ignore


def test_to_dict_leaves_out_the_default_placement():
    route = {**CONFIG["route"], "order": [0, 1, 2]}
    assert SequenceParallelConfig.from_dict({**CONFIG, "route": route}).to_dict() == CONFIG


@pytest.mark.parametrize("form", ("all_gather", {"name": "all_gather", "order": [0]}), ids=str)
def test_rows_may_be_kept_for_the_same_route_in_another_form(form):
    options = {"route": {"name": "all_gather"}, "backward_route": form, "keep_gathered": True}
    config = SequenceParallelConfig(sequence_parallel_size=8, **options)
    assert config.backward_route == config.route


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (
            {"sequence_paralel_size": 2},
            "'sequence_paralel_size'; did you mean 'sequence_parallel_size'",
        ),
        (
            {"route": "concentric", "team_size": 2},
            'unknown key \'team_size\'; it belongs inside "route": {"name": "concentric", ',
        ),
        ({"timeout": 0}, "timeout must be a number of seconds from 0.001 to 1e.09, got 0"),
        ({"timeout": "60"}, "timeout must be a number of seconds .*, got '60'"),
        ({"timeout": float("nan")}, "timeout must be a number of seconds .*, got nan"),
        ({"timeout": 10**400}, "timeout must be a number of seconds from 0.001 to 1e.09, got 10"),
        ({"kept_layers": 0}, "kept_layers must be a positive integer, got 0"),
        (
            {"kept_layers": 2},
            "kept_layers 2 has an effect only with keep_gathered .* leave kept_layers out",
        ),
        ({"keep_gathered": "yes"}, "keep_gathered must be true, false or \"auto\", got 'yes'"),
        (
            {"keep_gathered": True, "backward_route": {"name": "ring"}},
            "keep_gathered keeps what the forward's route .* leave one of them out",
        ),
        (
            {"keep_gathered": True, "strategy": "lss", "route": "auto"},
            "keep_gathered True contradicts strategy",
        ),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size must be a positive integer, got 0"),
        ({"sequence_parallel_size": 2.0}, "positive integer, got 2.0"),
        ({"sequence_parallel_size": True}, "positive integer, got True"),
        ({"ulysses_degree": 3}, "ulysses_degree must divide sequence_parallel_size 8, got 3"),
        (
            {"topology": "measur"},
            "topology must be one of .*or a .json or .toml file.*did you mean 'measure'",
        ),
        ({"topology": 8}, "topology must be one of .*got 8"),
        (
            {"topology": "measure"},
            "topology 'measure' has an effect only if another key is \"auto\"",
        ),
        ({"ulysses_degree": 2, "ulysses_stride": 3}, "ulysses_stride must divide .* = 4, got 3"),
        (
            {"route": "auto", "ulysses_degree": "auto", "ulysses_stride": 8},
            "no ulysses_degree .* with ulysses_stride 8",
        ),
        ({"route": "ring", "ulysses_stride": 2}, "ulysses_stride 2 .* with ulysses_degree 1 none"),
        ({"route": "ring", "ulysses_chunks": 2}, "ulysses_chunks 2 .* with ulysses_degree 1 none"),
        ({"ulysses_chunks": 0}, "ulysses_chunks must be a positive integer, got 0"),
        ({"ulysses_chunks": "all"}, 'ulysses_chunks must be a positive integer or "auto", got'),
        (
            {"strategy": "lss", "route": "auto", "ulysses_chunks": 2},
            'ulysses_chunks 2 contradicts strategy "lss"',
        ),
        ({"ulysses_stride": 0}, "ulysses_stride must be a positive integer, got 0"),
        ({"ulysses_stride": "far"}, 'ulysses_stride must be a positive integer or "auto", got'),
        (
            {"strategy": "lss", "route": "auto", "ulysses_stride": 2},
            'ulysses_stride 2 contradicts strategy "lss"',
        ),
        ({"ulysses_degree": 0}, "ulysses_degree must be a positive integer, got 0"),
        ({"ulysses_degree": True}, "ulysses_degree must be a positive integer, got True"),
        ({"ulysses_degree": "Auto"}, 'ulysses_degree must be a positive integer or "auto", got'),
        (
            {"ulysses_degree": "auto", "route": {"name": "mesh", "rows": 3, "cols": 2}},
            r"route: rows and cols.*fits no ulysses_degree of 1, 2, 4, 8",
        ),
        (
            {
                "ulysses_degree": "auto",
                "route": {"name": "mesh", "rows": 2, "cols": 2},
                "backward_route": {"name": "mesh", "rows": 2, "cols": 4},
            },
            "no ulysses_degree of sequence_parallel_size 8 fits both route .* and backward_route",
        ),
        (
            {"layout": "zig"},
            r"layout must be one of \['contiguous', 'zigzag', .* got 'zig'; did you mean 'zigzag'",
        ),
        ({"kernel": "flashh"}, "kernel must be one of.*did you mean 'flash'"),
        ({"backward_moves": "values"}, "backward_moves must be one of"),
        (
            {"route": {"name": "all_gather", "host_size": 4}, "backward_moves": "keys"},
            "host_size 4 of route 'all_gather' has no effect in the backward.*use 'queries'",
        ),
        (  # rows may or may not be kept
            {
                "backward_route": {"name": "all_gather", "host_size": 4},
                "backward_moves": "keys",
                "keep_gathered": "auto",
            },
            "host_size 4 of route 'all_gather' has no effect in the backward.*use 'queries'",
        ),
        (
            {
                "route": {"name": "mesh", "rows": 4, "cols": 2, "host_size": 4},
                "backward_moves": "queries",
            },
            "host_size 4 of route 'mesh' has no effect in the backward.*use 'keys'",
        ),
        (
            {"route": {"name": "all_gather", "host_size": 16}, "ulysses_degree": 2},
            "route: host_size must be at most 8, all ranks of a sequence, got 16",
        ),
        ({"route": {"name": "concentric", "team_size": 4}}, "route: team_size.*8 ranks.*got 4"),
        ({"route": "spiral"}, "route: route name must be one of"),
        ({"route": 3}, 'route must be "auto" or an object'),
        ({"route": None}, 'route must be "auto" or an object'),
        (
            {"backward_route": {"name": "mesh", "rows": 3, "cols": 2}},
            "backward_route: .*multiply to",
        ),
        (
            {"route": {"name": "concentric", "team_size": 2, "order": [0, 1]}},
            r"route: order must list every digit .*0 = block \(of 2\), 1 = position \(of 2\), "
            r"2 = member \(of 2\); got \[0, 1\]",
        ),
        (
            {"backward_route": {"name": "ring", "reverse": True}},
            "backward_route: route 'ring' takes no other key, got 'reverse'",
        ),
        (
            {"ulysses_degree": 4, "route": {"name": "concentric", "team_size": 2}},
            "sequence_parallel_size 8 / ulysses_degree 4 = 2",
        ),
    ),
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SequenceParallelConfig.from_dict({**CONFIG, **options})


@pytest.mark.parametrize("layout", (["zigzag"], {"name": "zigzag"}, None), ids=str)
def test_a_layout_that_is_no_string_is_refused_by_name(layout):
    with pytest.raises(ValueError, match="layout must be one of"):
        SequenceParallelConfig.from_dict({"layout": layout})
