"""Checks whether the installed packages fit ColossalAI and WallFacer.

Imports only the standard library, so that it runs where other imports fail.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

COLOSSALAI = "0.5.0"
TRANSFORMERS = "4.51.3"
MIN_TORCH = (2, 6)
NO_PINS = f"pip install --no-deps colossalai=={COLOSSALAI} galore_torch==1.0 peft==0.13.2"
DEPENDENCIES = ("accelerate", "bitsandbytes", "click", "einops", "fabric", "psutil", "safetensors")


def problems(installed: Callable[[str], str] = version) -> list[str]:
    """Return a sentence for each problem, with the command that solves it; [] if there is none.

    Args:
        installed: returns the version of a package, or raises PackageNotFoundError.
    """
    messages: list[str] = []

    def get_version(package: str) -> str | None:
        try:
            return installed(package)
        except PackageNotFoundError:
            return None

    torch, transformers, colossalai = map(get_version, ("torch", "transformers", "colossalai"))
    if torch is None or tuple(map(int, torch.split(".")[:2])) < MIN_TORCH:
        messages.append(
            f"torch is {torch or 'missing'}, and 2.6 or newer is needed (ColossalAI with its pins "
            f"pulls torch back to 2.5.1): pip install torch==2.13.0, then {NO_PINS}"
        )
    if transformers != TRANSFORMERS:
        messages.append(
            f"transformers is {transformers or 'missing'}, and ColossalAI {COLOSSALAI} works with "
            f"{TRANSFORMERS} alone: pip install transformers=={TRANSFORMERS}"
        )
    if colossalai != COLOSSALAI:
        messages.append(
            f"colossalai is {colossalai or 'missing'}, {COLOSSALAI} is needed: {NO_PINS}"
        )
    required = (*DEPENDENCIES, "galore_torch", "peft")
    missing = [package for package in required if get_version(package) is None]
    if missing:
        messages.append(
            f"missing: {', '.join(missing)}: pip install 'wallfacer[colossalai]', then {NO_PINS}"
        )
    return messages


def check() -> None:
    """Raise an ImportError with all problems of the installed packages, and their solutions."""
    if messages := problems():
        raise ImportError("WallFacer for ColossalAI cannot start. " + ". ".join(messages))
