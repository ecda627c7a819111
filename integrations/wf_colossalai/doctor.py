"""Whether the installed packages fit ColossalAI and us, and if not, what to type.

Imports nothing but the standard library: it runs where importing anything else fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

COLOSSALAI = "0.5.0"
TRANSFORMERS = "4.51.3"
TORCH = (2, 6)
NO_PINS = f"pip install --no-deps colossalai=={COLOSSALAI} galore_torch==1.0 peft==0.13.2"
BESIDE = ("accelerate", "bitsandbytes", "click", "einops", "fabric", "psutil", "safetensors")


def problems(installed: Callable[[str], str] = version) -> list[str]:
    """One sentence for everything that does not fit, each with the line to type; empty if all does.

    Args:
        installed: the version of a package; raises PackageNotFoundError if there is none.
    """
    found: list[str] = []

    def get(package: str) -> str | None:
        try:
            return installed(package)
        except PackageNotFoundError:
            return None

    torch, transformers, colossalai = get("torch"), get("transformers"), get("colossalai")
    if torch is None or _numbers(torch) < TORCH:
        found.append(
            f"torch is {torch or 'missing'}, and 2.6 or newer is needed (ColossalAI with its pins "
            f"pulls torch back to 2.5.1): pip install torch==2.13.0, then {NO_PINS}"
        )
    if transformers != TRANSFORMERS:
        found.append(
            f"transformers is {transformers or 'missing'}, and ColossalAI {COLOSSALAI} works with "
            f"{TRANSFORMERS} alone: pip install transformers=={TRANSFORMERS}"
        )
    if colossalai != COLOSSALAI:
        found.append(f"colossalai is {colossalai or 'missing'}, {COLOSSALAI} is needed: {NO_PINS}")
    missing = [package for package in (*BESIDE, "galore_torch", "peft") if get(package) is None]
    if missing:
        found.append(
            f"missing: {', '.join(missing)}: pip install 'wallfacer[colossalai]', then {NO_PINS}"
        )
    return found


def check() -> None:
    """Do nothing if everything fits.

    Raises:
        ImportError: saying all that does not fit and what to type.
    """
    if found := problems():
        raise ImportError("WallFacer for ColossalAI cannot start. " + ". ".join(found))


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
