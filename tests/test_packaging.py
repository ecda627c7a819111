"""`pyproject.toml` and `setup.cfg` share no setting, and a wheel contains every package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]

# Sections of setup.cfg -> the tables of pyproject.toml with the same settings.
TABLES = {"metadata": "project", "options": "tool.setuptools", "tool:pytest": "tool.pytest"}


def setup_settings(path: Path) -> Iterator[str]:
    """The settings of a setup.cfg, by their dotted names in pyproject.toml."""
    config = ConfigParser()
    config.read(path)
    for section in config.sections():
        top, *rest = section.split(".")
        table = ".".join([TABLES.get(top, f"tool.{top}"), *rest])
        yield from (f"{table}.{key}".replace("_", "-") for key in config[section])


def project_settings(table: dict[str, Any], name: str = "") -> Iterator[str]:
    """The dotted names of the settings of a pyproject.toml."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from project_settings(value, f"{name}{key}.")
        else:
            yield f"{name}{key}".replace("_", "-")


def test_no_setting_is_in_both_files() -> None:
    project = set(project_settings(tomllib.loads((ROOT / "pyproject.toml").read_text())))
    setup = set(setup_settings(ROOT / "setup.cfg"))
    assert "project.name" in project and "tool.setuptools.package-data.*" in setup
    assert project & setup == set()


def test_a_setting_in_both_files_is_found(tmp_path: Path) -> None:
    path = tmp_path / "setup.cfg"
    path.write_text(
        "[metadata]\nname = a\n[options]\nzip_safe = 1\n[options.package_data]\n* = b\n"
    )
    tables = {"project": {"name": "a"}, "tool": {"setuptools": {"package-data": {"*": ["b"]}}}}
    assert set(setup_settings(path)) & set(project_settings(tables)) == {
        "project.name",
        "tool.setuptools.package-data.*",
    }


def tracked() -> list[str]:
    """The files of the repository that git tracks."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git repository")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def test_a_wheel_built_from_a_clone_has_all_packages(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    files, clone = tracked(), tmp_path / "clone"
    for name in files:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    done = subprocess.run([sys.executable, *build, "."], cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    names = {name.removeprefix("integrations/") for name in files}
    names = {name for name in names if name.startswith("wf_")}
    assert packed == {name for name in names if name.endswith((".py", ".cpp", "/py.typed"))}
    assert {f"{name.split('/')[0]}/py.typed" for name in names} <= packed
