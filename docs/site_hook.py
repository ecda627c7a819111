"""What the site shows beside this folder: the tables that the benchmarks wrote.

A page links to `../benchmarks/results/lab.md`, which is right on a disk and on GitHub. In the site
that file is `results/lab.md`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ON_DISK, IN_SITE = "../benchmarks/results/", "results/"


def on_files(files: Files, config: Any) -> Files:
    """Add the tables to the site's files."""
    folder = Path(config.docs_dir, ON_DISK).resolve()
    for path in sorted(folder.glob("*.md")):
        name = f"{IN_SITE}{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to the tables lead to their pages in the site, and back."""
    return markdown.replace(ON_DISK, IN_SITE).replace("](../../docs/", "](../")
