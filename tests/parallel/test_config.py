"""The configuration: the same words everywhere, refused by name where they are wrong."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from wf_backends import SequenceParallelConfig

DESIGN = {
    "sequence_parallel_size": 8,
    "route": {"name": "concentric", "team_size": 2},
    "backward_route": None,
    "backward_moves": "keys",
    "ulysses_degree": 1,
    "layout": "zigzag",
    "kernel": "auto",
}


def test_a_dict_goes_in_and_comes_out():
    config = SequenceParallelConfig.from_dict(DESIGN)
    assert config.to_dict() == DESIGN
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert hash(SequenceParallelConfig.from_dict(DESIGN)) == hash(config)


@pytest.mark.parametrize(
    ("words", "stride", "degrees"),
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
def test_how_far_apart_ranks_trade_heads(words, stride, degrees):
    config = SequenceParallelConfig(sequence_parallel_size=8, **words)
    assert (config.ulysses_stride, config.degrees) == (stride, degrees)
    assert config.leaves_open == (words.get("route") is None or stride == "auto")
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    usual = "auto" if config.ulysses_degree == "auto" else 1
    assert ("ulysses_stride" in config.to_dict()) == (stride != usual)


@pytest.mark.parametrize(
    ("words", "chunks"),
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
def test_in_how_many_chunks_heads_are_traded(words, chunks):
    config = SequenceParallelConfig(sequence_parallel_size=8, **words)
    assert config.ulysses_chunks == chunks
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    usual = "auto" if config.ulysses_degree == "auto" else 1
    assert ("ulysses_chunks" in config.to_dict()) == (chunks != usual)
    if words.get("route") == "ring" and words.get("ulysses_degree") is None:
        assert not config.leaves_open


@pytest.mark.parametrize("source", ("measure", "h100-8x400g", "mine.json", "a/b.toml"))
def test_a_topology_goes_in_and_comes_out(source):
    config = SequenceParallelConfig(sequence_parallel_size=4, topology=source)
    assert config.to_dict()["topology"] == source
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config
    assert "topology" not in SequenceParallelConfig().to_dict()


@pytest.mark.parametrize(
    ("words", "degree", "moves", "degrees"),
    (
        ({}, "auto", "auto", (1, 2, 4, 8)),
        ({"route": "auto", "ulysses_degree": 1}, 1, "auto", (1,)),
        ({"ulysses_degree": 4, "backward_moves": "keys"}, 4, "keys", (4,)),
        ({"route": {"name": "all_gather", "host_size": 4}}, 1, "queries", (1,)),
        ({"route": {"name": "all_gather", "host_size": 1}}, 1, "keys", (1,)),
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
def test_what_is_not_said_follows_from_the_routes(words, degree, moves, degrees):
    config = SequenceParallelConfig(sequence_parallel_size=8, **words)
    assert (config.ulysses_degree, config.backward_moves, config.degrees) == (
        degree,
        moves,
        degrees,
    )
    assert config.leaves_open == ("auto" in (config.route, config.backward_route, degree, moves))
    assert SequenceParallelConfig.from_dict(config.to_dict()) == config


def test_it_is_frozen_all_the_way_down():
    config = SequenceParallelConfig.from_dict(DESIGN)
    with pytest.raises(FrozenInstanceError):
        config.layout = "contiguous"  # pyright: ignore
    with pytest.raises(TypeError):
        config.route["team_size"] = 1  # pyright: ignore


def test_the_order_of_a_routes_keys_means_nothing():
    a, b = ({"rows": 2, "cols": 4, "name": "mesh"}, {"name": "mesh", "cols": 4, "rows": 2})
    configs = [SequenceParallelConfig(sequence_parallel_size=8, route=route) for route in (a, b)]
    assert repr(configs[0]) == repr(configs[1])


def test_a_placement_goes_in_and_comes_out_as_a_json_has_it():
    placed = {"name": "concentric", "team_size": 2, "order": [2, 0, 1], "reverse": True}
    words = {**DESIGN, "route": placed, "backward_route": {"name": "ring", "reverse": True}}
    config = SequenceParallelConfig.from_dict(json.loads(json.dumps(words)))
    assert config.to_dict() == words
    assert pickle.loads(pickle.dumps(config)) == config != SequenceParallelConfig.from_dict(DESIGN)
    assert hash(config) == hash(SequenceParallelConfig.from_dict(words))
    placed["order"][0] = 7
    assert config.route["order"] == (2, 0, 1)  # pyright: ignore


def test_rank_order_said_is_the_same_as_unsaid():
    said = {**DESIGN["route"], "order": [0, 1, 2], "reverse": False}
    assert SequenceParallelConfig.from_dict({**DESIGN, "route": said}).to_dict() == DESIGN


@pytest.mark.parametrize(
    ("words", "says"),
    (
        (
            {"sequence_paralel_size": 2},
            "'sequence_paralel_size'; did you mean 'sequence_parallel_size'",
        ),
        (
            {"route": "concentric", "team_size": 2},
            'unknown key \'team_size\'; it belongs inside "route": {"name": "concentric", ',
        ),
        ({"timeout": 0}, "timeout must be a positive number of seconds below 1e.09, got 0"),
        ({"timeout": "60"}, "timeout must be a positive number of seconds .*, got '60'"),
        ({"timeout": float("nan")}, "timeout must be a positive number of seconds .*, got nan"),
        ({"timeout": 10**400}, "timeout must be a positive number of seconds below 1e.09, got 10"),
        ({"kept_layers": 0}, "kept_layers must be a positive integer, got 0"),
        ({"kept_layers": 2}, "kept_layers 2 is what keep_gathered .* leave kept_layers out"),
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
        ({"topology": "measure"}, "topology 'measure' is what \"auto\" goes by, but nothing is"),
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
            r"route: rows and cols.*fits no ulysses_degree of \[1, 2, 4, 8\]",
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
            "host_size 4 of route 'all_gather' does nothing in the backward.*say 'queries'",
        ),
        (
            {
                "route": {"name": "mesh", "rows": 4, "cols": 2, "host_size": 4},
                "backward_moves": "queries",
            },
            "host_size 4 of route 'mesh' does nothing in the backward.*say 'keys'",
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
            r"route: order must list every digit .*0 = block \(of 2\), 1 = place \(of 2\), "
            r"2 = member \(of 2\); got \[0, 1\]",
        ),
        ({"backward_route": {"name": "ring", "reverse": "yes"}}, "backward_route: reverse must be"),
        (
            {"route": {"name": "ring", "two_way": True}},
            "route: route 'ring' takes no other key, got 'two_way'",
        ),
        (
            {"ulysses_degree": 4, "route": {"name": "concentric", "team_size": 2}},
            "sequence_parallel_size 8 / ulysses_degree 4 = 2",
        ),
    ),
)
def test_wrong_words_are_refused_by_name(words, says):
    with pytest.raises(ValueError, match=says):
        SequenceParallelConfig.from_dict({**DESIGN, **words})


def test_a_layout_of_another_type_is_refused_by_name():
    for value in (["zigzag"], {"name": "zigzag"}, None):
        with pytest.raises(ValueError, match="layout must be one of"):
            SequenceParallelConfig.from_dict({"layout": value})
