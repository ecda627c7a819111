"""The typer application of all commands."""

from __future__ import annotations

import typer

from wf_backends.cli.bench import bench
from wf_backends.cli.bench_hetero import bench_hetero
from wf_backends.cli.chunk import chunk
from wf_backends.cli.doctor import doctor
from wf_backends.cli.explain import explain
from wf_backends.cli.generate import generate
from wf_backends.cli.links import bench_links
from wf_backends.cli.options import launched_rank
from wf_backends.cli.plan import plan
from wf_backends.cli.verify import verify

OF_A_JOB = ("bench", "bench-links", "doctor")  # these run on every rank that a launcher started
app = typer.Typer(
    name="wallfacer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback()
def run_once(context: typer.Context) -> None:
    """Exact long-context attention over many ranks: what to run on your cluster, and why."""
    if context.invoked_subcommand not in OF_A_JOB and launched_rank():
        raise typer.Exit


for command in (plan, explain, bench, bench_links, doctor, verify, chunk, generate, bench_hetero):
    app.command()(command)  # typer names bench_links bench-links
