"""One rank alone: every named scheme runs without its peers, and computes its share."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import ROOT
from wf_backends import SequenceParallel, SequenceParallelConfig

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import one_rank
    from bytes import named_points


def test_every_scheme_has_its_line(monkeypatch, capsys) -> None:
    words = "--ranks 4 --tokens 256 --heads 4 --kv-heads 4 --head-dim 8 --repeats 2"
    monkeypatch.setattr(sys, "argv", ["one_rank.py", *words.split()])
    one_rank.main()
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    names = [name.strip() for name, *_ in lines[2:]]
    assert names == [one_rank.ONE_CALL, *named_points(4)]
    assert float(lines[2][4]) == float(lines[2][5]) == 1
    assert all(float(line[4]) > 0 for line in lines[2:])


@pytest.mark.parametrize("ranks", [3, 5, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(monkeypatch, capsys, ranks) -> None:
    monkeypatch.setattr(sys, "argv", ["one_rank.py", "--ranks", str(ranks)])
    with pytest.raises(SystemExit):
        one_rank.parse()
    assert "--ranks must divide" in capsys.readouterr().err


def test_what_peers_send_is_computed_on() -> None:
    noise = torch.randn(1000, dtype=torch.float64)
    comm = one_rank.Alone(1, 4, {torch.float64: noise})
    config = SequenceParallelConfig(sequence_parallel_size=4, route="ring")
    q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64) for _ in range(3))
    out = SequenceParallel(config, comm).attention(q, k, v)
    sent = noise[:128].view(8, 1, 2, 8).transpose(0, 1)  # a message is (s, b, g, [k | v])
    pairs = zip((k, v), sent.split(4, dim=-1), strict=True)
    k, v = (torch.cat([own, *[others] * 3], 1) for own, others in pairs)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-10)
