"""benchmarks/one_rank.py: one rank of every named scheme runs without its peers."""

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


def test_the_table_has_a_row_for_every_scheme(monkeypatch, capsys) -> None:
    args = "--ranks 4 --tokens 256 --heads 4 --kv-heads 4 --head-dim 8 --repeats 2"
    monkeypatch.setattr(sys, "argv", ["one_rank.py", *args.split()])
    one_rank.main()
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    one_call, *schemes = rows = lines[2:]  # below the heading
    assert [row[0].strip() for row in rows] == [one_rank.ONE_CALL, *named_points(4)]
    assert float(one_call[4]) == float(one_call[5]) == 1
    assert all(float(row[4]) > 0 for row in schemes)


@pytest.mark.parametrize("ranks", [3, 5, 16])
def test_ranks_that_do_not_divide_the_heads_are_refused(monkeypatch, capsys, ranks) -> None:
    monkeypatch.setattr(sys, "argv", ["one_rank.py", "--ranks", str(ranks)])
    with pytest.raises(SystemExit):
        one_rank.parse()
    assert "--ranks must divide" in capsys.readouterr().err


def test_a_rank_computes_with_the_rows_of_its_absent_peers() -> None:
    """Every message that it receives is the same noise."""
    noise = torch.randn(1000, dtype=torch.float64)
    comm = one_rank.Alone(1, 4, {torch.float64: noise})
    config = SequenceParallelConfig(sequence_parallel_size=4, route="ring")
    q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64) for _ in range(3))
    out = SequenceParallel(config, comm).attention(q, k, v)
    message = noise[:128].view(8, 1, 2, 8).transpose(0, 1)  # from (s, b, g, [k | v])
    peer_k, peer_v = message.split(4, dim=-1)
    k, v = torch.cat([k, *[peer_k] * 3], 1), torch.cat([v, *[peer_v] * 3], 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    assert torch.allclose(out, expected, atol=1e-10)
