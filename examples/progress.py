"""The progress that rank 0 prints: a bar in a terminal, lines elsewhere (mpirun, a log file)."""

from __future__ import annotations

from curve import Row
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Context manager; call `show(row)` once per optimizer step.

    Args:
        first, last: optimizer steps done before this run, and at its end.
        visible: False on all ranks but 0.
    """

    def __init__(self, first: int, last: int, visible: bool = True) -> None:
        self._console = Console(quiet=not visible)
        self._print_interval = max(1, (last - first) // 10)
        self._last = last
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,  # under mpirun a log file looks like a terminal
            disable=not (visible and self._console.is_terminal),
        )
        self._task = self._bar.add_task("train", total=last, completed=first, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, row: Row) -> None:
        """Move the bar, or print a line about ten times a run."""
        self._bar.update(self._task, completed=row.step, figures=figures(row), refresh=True)
        due = row.step % self._print_interval == 0 or row.step in (1, self._last)
        if due and not self._console.is_terminal:
            self._console.print(f"step {row.step}/{self._last}  {figures(row)}", highlight=False)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)


def figures(row: Row) -> str:
    """A line with the loss, tokens per second of all ranks, and MB that rank 0 sent in the step."""
    speed = row.tokens / max(row.seconds, 1e-9)
    return f"loss {row.loss:.4f}  {speed:,.0f} tokens/s  {row.bytes_sent / 1e6:.2f} MB sent"
