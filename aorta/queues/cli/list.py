"""list: the workloads and their questions."""

import sys
from collections.abc import Sequence

import click

from aorta.queues import catalogue
from aorta.queues.catalogue import ListedWorkload


@click.command("list")
@click.option("--verbose", "-v", is_flag=True, help="What a stream count means, and the workload's options.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def list_command(verbose: bool, as_json: bool) -> None:
    """The workloads: what each asks, and in which unit it answers."""
    chosen = list(catalogue.catalogue().values())
    if as_json:
        from aorta.account.results.schema import to_json

        names = ("name", "priority", "unit", "question", "min_streams", "max_streams")
        rows = [{name: getattr(workload, name) for name in names} for workload in chosen]
        sys.stdout.buffer.write(to_json(rows) + b"\n")
        return
    show_list(chosen, verbose)


def show_list(chosen: Sequence[ListedWorkload], verbose: bool) -> None:
    """Prints each with its question below; verbose adds what a stream means and the workload's options."""
    from rich.console import Console
    from rich.markup import escape
    from rich.padding import Padding

    console = Console(highlight=False)
    width = max((len(workload.name) for workload in chosen), default=0)
    for workload in chosen:
        span = f"{workload.min_streams}-{workload.max_streams} streams"
        console.print(
            f"[bold]{workload.name:{width}}[/bold]  {workload.priority}  {span:13}  {escape(workload.unit)}"
        )
        lines = [workload.question]
        if verbose:
            flags = " ".join(option.flag for option in workload.options)
            lines += [f"streams: {workload.stream_meaning}", *([f"options: {flags}"] if flags else [])]
        for line in lines:
            console.print(Padding(escape(line), (0, 0, 0, 4)), style="dim")
