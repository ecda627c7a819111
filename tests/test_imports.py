"""The dependency direction: the core knows no framework, the pure modules know no torch."""

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

# The packages of the core, in the order in which they build on each other. Those of one row know
# nothing of each other.
ROWS = (
    ("schedule",),
    ("lowering",),
    ("comm", "kernels"),
    ("runtime", "launch"),
    ("cluster",),
    ("cost",),
    ("planner",),
    ("config", "weights"),
    ("parallel",),
    ("dsp", "slicing", "hetegen", "budget"),
    ("graph",),
    ("tiling",),
    ("autochunk",),
    ("cli",),
)
PACKAGES = tuple(f"wf_backends.{name}" for row in ROWS for name in row)
PURE_PACKAGES = ("schedule", "lowering", "cost", "planner", "config", "weights", "budget")
PURE = tuple(f"wf_backends.{name}" for name in ("_validation", *PURE_PACKAGES))
PURE_MODULES = (  # of packages that are not
    "wf_backends.cluster.job",
    "wf_backends.cluster.presets",
    "wf_backends.cluster.topology",
    "wf_backends.launch.environment",
    "wf_backends.parallel.choose",
)
FLAT = 3  # modules beside the packages, at most


@dataclass(frozen=True)
class Rule:
    """No module of `importers` imports any of `forbidden`; names stand for all that is inside."""

    importers: tuple[str, ...]
    forbidden: tuple[str, ...]


def later(row: int, name: str) -> tuple[str, ...]:
    """The packages that `name`, of that row, may not import."""
    beside = (other for other in ROWS[row] if other != name)
    return tuple(
        f"wf_backends.{other}" for other in (*beside, *(n for r in ROWS[row + 1 :] for n in r))
    )


RULES = (
    Rule(("wf_backends",), FRAMEWORKS + INTEGRATIONS),
    *(
        Rule((f"wf_backends.{name}",), later(row, name))
        for row, names in enumerate(ROWS)
        for name in names
    ),
    *(
        Rule((name,), tuple(other for other in DOORS if other not in (name, "wf_transformers")))
        for name in DOORS
    ),
    Rule(("wf_transformers", "wf_accelerate", "wf_diffusers"), ("deepspeed", "colossalai")),
    Rule(("wf_deepspeed",), ("colossalai",)),
    Rule(("wf_colossalai",), ("deepspeed",)),
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
    """Whether a pure module may import `name`; of the faces, it takes pure names."""
    known = name.split(".")[0] in sys.stdlib_module_names or inside(name, PURE + PURE_MODULES)
    return known or (name.startswith("wf_backends.") and pure_home(name))


@cache
def pure_home(name: str) -> bool:
    """Whether `name` is taken from a package's face, to which a pure module gave it."""
    package, _, leaf = name.rpartition(".")
    face = modules(ROOT).get(f"{package}.__init__")
    homes = {full for full in imported(package, face) if full.endswith(f".{leaf}")} if face else ()
    return any(inside(home, PURE + PURE_MODULES) for home in homes)


def package_of(name: str) -> str | None:
    return next((package for package in PACKAGES if inside(name, (package,))), None)


def behind_a_face(module: str, name: str) -> bool:
    """Whether it is taken from inside another package, and not from its `__init__.py`."""
    package = package_of(name)
    if package in (None, package_of(module), name):
        return False
    deeper = name.removeprefix(f"{package}.").split(".")
    return len(deeper) > 1 and module != "wf_backends.__init__"


def violations(root: Path) -> list[str]:
    """'importer imports imported', for every import against the direction."""
    found = []
    for module, path in modules(root).items():
        rules = [rule for rule in RULES if inside(module, rule.importers)]
        for name in imported(module, path):
            against_rule = any(inside(name, rule.forbidden) for rule in rules)
            against_purity = inside(module, PURE + PURE_MODULES) and not pure(name)
            if against_rule or against_purity or behind_a_face(module, name):
                found.append(f"{module} imports {name}")
    return found


def test_the_repository_keeps_the_direction() -> None:
    assert "wf_backends.schedule.mask" in modules(ROOT)  # the walk sees the code at all
    assert violations(ROOT) == []


def test_the_core_is_its_packages() -> None:
    core = ROOT / "wf_backends"
    folders = {path.parent.name for path in core.glob("*/__init__.py")}
    assert folders <= {name for row in ROWS for name in row}
    assert len([path for path in core.glob("*.py") if path.stem != "__init__"]) <= FLAT


CLUSTERS_TIMER = "wf_backends.cluster.Timer"
COMMS_MPI = "wf_backends.comm.mpi.load_mpi"


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
        ("wf_backends/planner/a.py", "from wf_backends.cluster import Timer", CLUSTERS_TIMER),
        ("wf_backends/cli/a.py", "from wf_backends.comm.mpi import load_mpi", COMMS_MPI),
        ("integrations/wf_deepspeed/a.py", "import wf_colossalai", "wf_colossalai"),
        ("integrations/wf_colossalai/a.py", "import wf_deepspeed.mpu", "wf_deepspeed.mpu"),
        ("integrations/wf_transformers/a.py", "import wf_deepspeed", "wf_deepspeed"),
        ("integrations/wf_transformers/a.py", "import wf_accelerate", "wf_accelerate"),
        ("integrations/wf_deepspeed/a.py", "import wf_accelerate", "wf_accelerate"),
        ("integrations/wf_colossalai/a.py", "import wf_accelerate", "wf_accelerate"),
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
        ("wf_backends/lowering/a.py", "from .tiles import Tile\nfrom math import inf"),
        ("wf_backends/planner/a.py", "from wf_backends import schedule, lowering"),
        ("wf_backends/planner/a.py", "from wf_backends.cluster import Topology"),
        ("wf_backends/kernels/a.py", "import torch\nfrom wf_backends.schedule import Band"),
        ("wf_backends/parallel/a.py", "from wf_backends import comm, kernels\nimport torch"),
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
