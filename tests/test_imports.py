"""Imports: the core imports no framework, a package only earlier ones, a pure module no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE_ROOTS = (".", "integrations")

FRAMEWORKS = ("deepspeed", "colossalai", "transformers", "accelerate", "diffusers")
DOORS = ("wf_deepspeed", "wf_colossalai", "wf_transformers", "wf_accelerate", "wf_diffusers")
INTEGRATIONS = ("integrations", *DOORS)

# The packages of the core: each imports only from packages of earlier rows.
ROWS = (
    ("schedule",),
    ("lowering",),
    ("comm", "kernels"),
    ("runtime", "launch"),
    ("cluster",),
    ("cost",),
    ("planner",),
    ("config", "hetegen.weights"),
    ("parallel",),
    ("dsp", "decode", "sparse", "hetegen", "budget", "autochunk.slicing"),
    ("autochunk.graph",),
    ("autochunk.tiling",),
    ("autochunk",),
    ("cli",),
)
ROW_OF = {f"wf_backends.{name}": index for index, row in enumerate(ROWS) for name in row}
PACKAGES = tuple(ROW_OF)
PURE_PACKAGES = ("schedule", "lowering", "cost", "planner", "config", "hetegen.weights", "budget")
PURE = tuple(f"wf_backends.{name}" for name in ("_validation", *PURE_PACKAGES))
PURE_MODULES = (  # of packages that are not pure
    "wf_backends.cluster.presets",
    "wf_backends.cluster.topology",
    "wf_backends.launch.environment",
    "wf_backends.parallel.choose",
)
MAX_TOP_MODULES = 3  # of the core, beside its packages


@dataclass(frozen=True)
class Rule:
    """No module in the packages `importers` imports anything in the packages `forbidden`."""

    importers: tuple[str, ...]
    forbidden: tuple[str, ...]


RULES = (
    Rule(("wf_backends",), FRAMEWORKS + INTEGRATIONS),
    *(
        Rule((name,), tuple(other for other in DOORS if other not in (name, "wf_transformers")))
        for name in DOORS
    ),
    Rule(("wf_transformers", "wf_accelerate", "wf_diffusers"), ("deepspeed", "colossalai")),
    Rule(("wf_deepspeed",), ("colossalai",)),
    Rule(("wf_colossalai",), ("deepspeed",)),
)


def inside(name: str, packages: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `packages` or in one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module under the source roots of `root`."""
    files = {}
    for source_root in SOURCE_ROOTS:
        for path in (root / source_root).glob("wf_*/**/*.py"):
            parts = path.relative_to(root / source_root).with_suffix("").parts
            files[".".join(parts)] = path
    return files


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


def is_pure(name: str) -> bool:
    """Whether a pure module may import `name`."""
    if name.split(".")[0] in sys.stdlib_module_names or inside(name, PURE + PURE_MODULES):
        return True
    return name.startswith("wf_backends.") and exported_by_a_pure_module(name)


@cache
def exported_by_a_pure_module(name: str) -> bool:
    """Whether the `__init__.py` of a package exports `name` and imports it from a pure module."""
    package, _, exported = name.rpartition(".")
    init = modules(ROOT).get(f"{package}.__init__")
    if init is None:
        return False
    sources = [source for source in imported(package, init) if source.endswith(f".{exported}")]
    return any(inside(source, PURE + PURE_MODULES) for source in sources)


def package_of(name: str) -> str | None:
    """The package of the core that `name` is, or is in; of nested ones the inner one."""
    return max((package for package in PACKAGES if inside(name, (package,))), key=len, default=None)


def is_against_the_order(module: str, name: str) -> bool:
    """Whether `module` imports `name` from another package of its row, or of a later one."""
    importer, package = package_of(module), package_of(name)
    if importer is None or package is None or importer == package:
        return False
    return ROW_OF[package] >= ROW_OF[importer]


def is_not_exported(module: str, name: str) -> bool:
    """Whether `module` imports `name` from a module inside another package of the core."""
    package = package_of(name)
    if package in (None, package_of(module), name):
        return False
    parts_in_package = name.removeprefix(f"{package}.").split(".")
    return len(parts_in_package) > 1 and module != "wf_backends.__init__"


def violations(root: Path) -> list[str]:
    """A line `IMPORTER imports NAME` for every import that is not allowed."""
    lines = []
    for module, path in modules(root).items():
        rules = [rule for rule in RULES if inside(module, rule.importers)]
        for name in imported(module, path):
            against_rule = any(inside(name, rule.forbidden) for rule in rules)
            against_purity = inside(module, PURE + PURE_MODULES) and not is_pure(name)
            is_forbidden = against_rule or against_purity or is_against_the_order(module, name)
            if is_forbidden or is_not_exported(module, name):
                lines.append(f"{module} imports {name}")
    return lines


def test_every_import_of_the_repository_is_allowed() -> None:
    assert "wf_backends.schedule.mask" in modules(ROOT)  # the modules are found
    assert violations(ROOT) == []


def test_the_core_consists_of_the_listed_packages() -> None:
    core = ROOT / "wf_backends"
    folders = [path.parent.relative_to(core) for path in core.glob("*/**/__init__.py")]
    assert {".".join(folder.parts) for folder in folders} == {name for row in ROWS for name in row}
    assert len([path for path in core.glob("*.py") if path.stem != "__init__"]) <= MAX_TOP_MODULES


AUTOCHUNK_A = "wf_backends.autochunk.a"
CLUSTERS_TIMER = "wf_backends.cluster.Timer"
COMMS_MPI = "wf_backends.comm.mpi.MpiComm"
TILING = "wf_backends.autochunk.tiling"


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("wf_backends/parallel/a.py", "import deepspeed.comm", "deepspeed.comm"),
        ("wf_backends/parallel/a.py", "from transformers import Trainer", "transformers.Trainer"),
        ("wf_backends/parallel/a.py", "import wf_deepspeed", "wf_deepspeed"),
        ("wf_backends/dsp/a.py", "def f():\n    import accelerate", "accelerate"),
        ("wf_backends/dsp/a.py", "m = importlib.import_module('colossalai')", "colossalai"),
        ("wf_backends/schedule/a.py", "from torch import Tensor", "torch.Tensor"),
        ("wf_backends/schedule/a.py", "import numpy as np", "numpy"),
        ("wf_backends/lowering/a.py", "from ..kernels import merge", "wf_backends.kernels.merge"),
        ("wf_backends/kernels/a.py", "from ..comm import local", "wf_backends.comm.local"),
        ("wf_backends/kernels/a.py", "from wf_backends import comm", "wf_backends.comm"),
        ("wf_backends/comm/a.py", "import wf_backends.kernels", "wf_backends.kernels"),
        ("wf_backends/runtime/a.py", "from wf_backends import parallel", "wf_backends.parallel"),
        ("wf_backends/dsp/a.py", "from wf_backends.hetegen import x", "wf_backends.hetegen.x"),
        ("wf_backends/autochunk/graph/a.py", "from wf_backends.autochunk import a", AUTOCHUNK_A),
        ("wf_backends/autochunk/graph/a.py", f"import {TILING}", TILING),
        ("wf_backends/hetegen/weights/a.py", "import torch", "torch"),
        ("wf_backends/planner/a.py", "from wf_backends.cluster import Timer", CLUSTERS_TIMER),
        ("wf_backends/cli/a.py", "from wf_backends.comm.mpi import MpiComm", COMMS_MPI),
        ("integrations/wf_deepspeed/a.py", "import wf_colossalai", "wf_colossalai"),
        ("integrations/wf_colossalai/a.py", "import wf_deepspeed.mpu", "wf_deepspeed.mpu"),
        ("integrations/wf_transformers/a.py", "import wf_deepspeed", "wf_deepspeed"),
        ("integrations/wf_transformers/a.py", "import wf_accelerate", "wf_accelerate"),
        ("integrations/wf_deepspeed/a.py", "import wf_accelerate", "wf_accelerate"),
        ("integrations/wf_colossalai/a.py", "import wf_accelerate", "wf_accelerate"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, line: str, name: str) -> None:
    write(tmp_path, module, line)
    importer = module.removeprefix("integrations/").removesuffix(".py").replace("/", ".")
    assert violations(tmp_path) == [f"{importer} imports {name}"]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("wf_backends/lowering/a.py", "from .tiles import Tile\nfrom math import inf"),
        ("wf_backends/planner/a.py", "from wf_backends import schedule, lowering"),
        ("wf_backends/planner/a.py", "from wf_backends.cluster import Topology"),
        ("wf_backends/kernels/a.py", "import torch\nfrom wf_backends.schedule import Band"),
        ("wf_backends/parallel/a.py", "from wf_backends import comm, kernels\nimport torch"),
        ("wf_backends/autochunk/a.py", "from wf_backends.autochunk.graph import Captured"),
        ("integrations/wf_deepspeed/a.py", "import deepspeed, transformers, wf_transformers"),
        ("integrations/wf_colossalai/a.py", "from wf_transformers import attention"),
    ],
)
def test_an_allowed_import_is_no_violation(tmp_path: Path, module: str, line: str) -> None:
    write(tmp_path, module, line)
    assert violations(tmp_path) == []


def test_every_folder_of_modules_is_a_package() -> None:
    """A wheel lacks the modules of a folder without `__init__.py`."""
    folders = {path.parent for path in modules(ROOT).values()}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    top_folders = [f for f in folders if f.parent.name in (ROOT.name, "integrations")]
    assert [folder for folder in top_folders if not (folder / "py.typed").exists()] == []


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
