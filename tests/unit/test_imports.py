"""The dependency direction: the core knows no framework, the pure modules know no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = (".", "integrations")

FRAMEWORKS = ("deepspeed", "colossalai", "transformers", "accelerate")
INTEGRATIONS = ("integrations", "wf_deepspeed", "wf_colossalai", "wf_transformers")
PURE = tuple(
    f"wf_backends.{name}"
    for name in (
        (
            "schedule layout mask ranges tiles nearby tracks journeys rankplan rounds walk "
            "rankphases strands timeline traffic pace typical near calls pools "
            "topology presets areas loads placement cost axes estimate plans search planner config "
            "suggest documents launchers trading words launched splits"
        ).split()
    )
)


@dataclass(frozen=True)
class Rule:
    """No module of `importers` imports any of `forbidden`; names stand for all that is inside."""

    importers: tuple[str, ...]
    forbidden: tuple[str, ...]


RULES = (
    Rule(("wf_backends",), FRAMEWORKS + INTEGRATIONS),
    Rule(("wf_backends.kernels",), ("wf_backends.comm",)),
    Rule(("wf_backends.comm",), ("wf_backends.kernels",)),
    Rule(
        ("wf_backends.kernels", "wf_backends.comm", "wf_backends.merge"),
        ("wf_backends.executor", "wf_backends.parallel"),
    ),
    Rule(("wf_transformers",), ("deepspeed", "colossalai", "wf_deepspeed", "wf_colossalai")),
    Rule(("wf_deepspeed",), ("colossalai", "wf_colossalai")),
    Rule(("wf_colossalai",), ("deepspeed", "wf_deepspeed")),
)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `packages` or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module under the source roots of `root`."""
    found = {}
    for source_root in SOURCE_ROOTS:
        for path in (root / source_root).glob("wf_*/**/*.py"):
            parts = path.relative_to(root / source_root).with_suffix("").parts
            found[".".join(parts)] = path
    return found


def imported(module: str, path: Path) -> Iterator[str]:
    """Absolute dotted names that a file imports, also inside functions and by importlib.

    `from a import b` gives a.b, whether b is a module of a or a name in it.
    """
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = module.split(".")[:-level] if level else []
                prefix = ".".join(base + ([source] if source else []))
                yield from (f"{prefix}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def pure(name: str) -> bool:
    """Whether a pure module may import `name`."""
    return name.split(".")[0] in sys.stdlib_module_names or inside(name, PURE)


def violations(root: Path) -> list[str]:
    """'importer imports imported', for every import against the direction."""
    found = []
    for module, path in modules(root).items():
        rules = [rule for rule in RULES if inside(module, rule.importers)]
        for name in imported(module, path):
            against_rule = any(inside(name, rule.forbidden) for rule in rules)
            against_purity = inside(module, PURE) and not pure(name)
            if against_rule or against_purity:
                found.append(f"{module} imports {name}")
    return found


def test_the_repository_keeps_the_direction() -> None:
    assert "wf_backends.mask" in modules(ROOT)  # the walk sees the code at all
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("wf_backends/parallel.py", "import deepspeed.comm", "deepspeed.comm"),
        ("wf_backends/parallel.py", "from transformers import Trainer", "transformers.Trainer"),
        ("wf_backends/parallel.py", "import wf_deepspeed", "wf_deepspeed"),
        ("wf_backends/data.py", "def f():\n    import accelerate", "accelerate"),
        ("wf_backends/data.py", "m = importlib.import_module('colossalai')", "colossalai"),
        ("wf_backends/schedule.py", "from torch import Tensor", "torch.Tensor"),
        ("wf_backends/schedule.py", "import numpy as np", "numpy"),
        ("wf_backends/tiles.py", "from .merge import merge", "wf_backends.merge.merge"),
        ("wf_backends/kernels/sdpa.py", "from ..comm import local", "wf_backends.comm.local"),
        ("wf_backends/kernels/sdpa.py", "from wf_backends import comm", "wf_backends.comm"),
        ("wf_backends/comm/local.py", "import wf_backends.kernels", "wf_backends.kernels"),
        ("wf_backends/merge.py", "from wf_backends import parallel", "wf_backends.parallel"),
        ("integrations/wf_deepspeed/a.py", "import wf_colossalai", "wf_colossalai"),
        ("integrations/wf_colossalai/a.py", "import wf_deepspeed.mpu", "wf_deepspeed.mpu"),
        ("integrations/wf_transformers/a.py", "import wf_deepspeed", "wf_deepspeed"),
    ],
)
def test_an_import_against_the_direction_is_found(
    tmp_path: Path, module: str, line: str, name: str
) -> None:
    write(tmp_path, module, line)
    importer = module.removeprefix("integrations/").removesuffix(".py").replace("/", ".")
    assert violations(tmp_path) == [f"{importer} imports {name}"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("wf_backends/tiles.py", "from .mask import Band\nfrom math import inf"),
        ("wf_backends/planner.py", "from wf_backends import schedule, traffic"),
        ("wf_backends/kernels/sdpa.py", "import torch\nfrom wf_backends.mask import Band"),
        ("wf_backends/parallel.py", "from wf_backends import comm, kernels\nimport torch"),
        ("integrations/wf_deepspeed/a.py", "import deepspeed, transformers, wf_transformers"),
        ("integrations/wf_colossalai/a.py", "from wf_transformers import attention"),
    ],
)
def test_an_import_along_the_direction_is_not(tmp_path: Path, module: str, line: str) -> None:
    write(tmp_path, module, line)
    assert violations(tmp_path) == []


def test_every_folder_of_modules_is_a_package() -> None:
    """Else it works from the repository and is missing from the wheel."""
    folders = {path.parent for path in modules(ROOT).values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    tops = {folder for folder in folders if folder.parent.name in (ROOT.name, "integrations")}
    assert [top for top in tops if not (top / "py.typed").exists()] == []


def test_importing_the_core_loads_no_optional_package() -> None:
    optional = {*FRAMEWORKS, *INTEGRATIONS, "mpi4py", "flash_attn", "torch._dynamo"}
    code = (
        "import json, sys\n"
        "from wf_backends import SequenceParallel, SequenceParallelConfig\n"
        "print(json.dumps(list(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert optional.isdisjoint(json.loads(run.stdout.splitlines()[-1]))


def write(root: Path, module: str, source: str) -> None:
    (root / module).parent.mkdir(parents=True)
    (root / module).write_text(source)
