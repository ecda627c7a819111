"""`wallfacer bench-hetero` measures the rates of this machine; `wallfacer generate` uses them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch

from wf_backends.cli import bench_hetero as module
from wf_backends.cli.generate import accelerator_rates

RATES = {"link": 2e10, "host": 6e10, "accelerator": 1e12, "memory": 1e11, "staging": None}


@pytest.fixture
def hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host is named "lab"."""
    monkeypatch.setattr(module.socket, "gethostname", lambda: "lab")


@pytest.fixture
def cache(tmp_path: Path, hostname: None) -> Path:
    """A folder with rates of this host."""
    content = {"device": "cuda:0", "rates": RATES}
    (tmp_path / "hetero-lab-bfloat16.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes whose rates were measured; a measurement gives constants."""
    import wf_backends.hetegen as hetegen

    dtypes: list[torch.dtype] = []

    def measure(dtype: torch.dtype, pin_weights: bool) -> tuple[str, hetegen.Rates]:
        dtypes.append(dtype)
        return "cuda:0", hetegen.Rates(2e10 if pin_weights else 1e10, 3e10, 1e12)

    monkeypatch.setattr(hetegen, "measure_machine", measure)
    return dtypes


def test_bench_hetero_predicts_tokens_per_second(wallfacer, cache: Path) -> None:
    """20 GB at 20 GB/s of the link and 60 GB/s of the host: alone, 1 and 3 tokens a second."""
    code, out, _ = wallfacer("bench-hetero", "--model-size", "20GB", "--cache-dir", str(cache))
    assert code == 0 and "alpha 0.75" in out
    predicted = re.findall(r"(HeteGen|streaming|the CPU alone) +([\d.]+) tokens/s", out)
    assert predicted == [("HeteGen", "4.00"), ("streaming", "1.00"), ("the CPU alone", "3.00")]


def test_bench_hetero_counts_the_fixed_time_of_the_hosts_calls(wallfacer, cache: Path) -> None:
    """1 ms for each of 149 weights of 134 MB, beside a third of a second of computing."""
    content = {"device": "cuda:0", "rates": RATES | {"host_call_seconds": 1e-3}}
    (cache / "hetero-lab-bfloat16.json").write_text(json.dumps(content))
    out = wallfacer("bench-hetero", "--model-size", "20GB", "--cache-dir", str(cache))[1]
    alone = re.search(r"the CPU alone +([\d.]+) tokens/s", out)
    assert alone and float(alone[1]) == pytest.approx(1 / (1 / 3 + 0.149), rel=0.01)


@pytest.mark.parametrize("given", [None, "AVX2"])
def test_bench_hetero_computes_without_amx_unless_told_otherwise(
    wallfacer, cache: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", given or "")
    if given is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert wallfacer("bench-hetero", "--cache-dir", str(cache))[0] == 0
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == (given or "AVX512_CORE_BF16")


def test_bench_hetero_measures_once_per_dtype(wallfacer, tmp_path: Path, measured) -> None:
    args = ("bench-hetero", "--cache-dir", str(tmp_path / "kept"))
    (code, first, _), (second_code, second, _) = wallfacer(*args), wallfacer(*args)
    assert code == second_code == 0 and len(measured) == 1
    assert "measured" in first and "from " in second
    assert first.splitlines()[1:] == second.splitlines()[1:]
    wallfacer(*args, "--fresh")
    assert measured == [torch.bfloat16] * 2
    wallfacer(*args, "--dtype", "float32")
    assert measured[2:] == [torch.float32]


def test_bench_hetero_keeps_other_rates_for_pinned_weights(
    wallfacer, tmp_path: Path, measured
) -> None:
    args = ("bench-hetero", "--cache-dir", str(tmp_path / "kept"))
    for _ in range(2):
        assert re.search(r"pinned host memory .* 10.00 GB/s", wallfacer(*args)[1])
        assert re.search(r"pinned host .* 20.00 GB/s", wallfacer(*args, "--pin-weights")[1])
    assert len(measured) == 2


def test_generate_takes_the_kept_rates_of_this_device(
    tmp_path: Path, monkeypatch, hostname: None, measured
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    from wf_backends.hetegen import Rates

    model = torch.nn.Linear(2, 2, dtype=torch.float16)
    for _ in range(2):
        assert accelerator_rates(model, tmp_path, pin_weights=False) == Rates(1e10, 3e10, 1e12)
    assert measured == [torch.float16]
    file = tmp_path / "hetero-lab-float16.json"
    file.write_text(file.read_text().replace("cuda:0", "threads"))  # measured without the GPU
    assert accelerator_rates(model, tmp_path, pin_weights=False).host == 3e10 and len(measured) == 2


def fail(*_: object) -> None:
    raise OSError("no space left")


def test_a_full_disk_leaves_the_kept_rates_as_they_are(
    wallfacer, cache: Path, monkeypatch, measured
) -> None:
    kept = cache / "hetero-lab-bfloat16.json"
    kept.write_text(kept.read_text().replace("link", "of another version"))
    before = kept.read_text()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(cache))
    assert code == 0 and "not kept (no space left)" in out and "tokens/s" in out
    assert kept.read_text() == before and [*cache.iterdir()] == [kept]


def test_a_file_in_place_of_the_cache_folder_is_reported(
    wallfacer, tmp_path: Path, measured
) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(tmp_path / "file"))
    assert code == 0 and "not kept (" in out


def test_brackets_of_a_folder_are_not_read_as_markup(
    wallfacer, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a[" / "b]"
    folder.mkdir(parents=True)
    (folder / "hetero-lab-bfloat16.json").write_text(
        (cache / "hetero-lab-bfloat16.json").read_text()
    )
    code, out, _ = wallfacer("bench-hetero", "--cache-dir", str(folder))
    assert code == 0 and f"from {folder}/hetero-lab-bfloat16.json" in out
    (folder / "config.json").write_text('{"model_type": "llama"}')
    args = ("generate", "--prompt", "w3", "--max-memory", "80kB", "--shaped", "1,2,3")
    assert f"loading {folder}" in wallfacer(*args, "--model", str(folder))[2]


@pytest.mark.parametrize("size", ["many", "0B", "26"])
def test_bench_hetero_refuses_a_bad_size(wallfacer, cache: Path, size: str) -> None:
    code, _, err = wallfacer("bench-hetero", "--model-size", size, "--cache-dir", str(cache))
    assert code == 2 and repr(size) in err
    assert ('with its unit, such as "20GB"' in err) == (size != "0B")
