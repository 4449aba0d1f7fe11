"""list: the workloads and their questions."""

import sys

import click

from aorta.queues.registry import CATEGORIES, workloads
from aorta.results.schema import to_json


@click.command("list")
@click.option("--category", "-c", type=click.Choice(CATEGORIES))
@click.option("--verbose", "-v", is_flag=True, help="What a stream count means, and the workload's options.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def list_command(category: str | None, verbose: bool, as_json: bool) -> None:
    """The workloads: what each asks, and in which unit it answers."""
    chosen = [one for one in workloads().values() if category in (None, one.category)]
    if as_json:
        rows = [
            {
                "name": one.name,
                "category": one.category,
                "priority": one.priority,
                "unit": one.unit,
                "question": one.question,
                "min_streams": one.min_streams,
                "max_streams": one.max_streams,
            }
            for one in chosen
        ]
        sys.stdout.buffer.write(to_json(rows) + b"\n")
        return
    from aorta.queues.cli.show import show_list

    show_list(chosen, verbose)
