"""list: the workloads and their questions."""

import sys

import click

from aorta.queues import catalogue
from aorta.queues.catalogue import CATEGORIES


@click.command("list")
@click.option("--category", "-c", type=click.Choice(CATEGORIES))
@click.option("--verbose", "-v", is_flag=True, help="What a stream count means, and the workload's options.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def list_command(category: str | None, verbose: bool, as_json: bool) -> None:
    """The workloads: what each asks, and in which unit it answers."""
    chosen = [
        workload for workload in catalogue.catalogue().values() if category in (None, workload.category)
    ]
    if as_json:
        from aorta.results.schema import to_json

        rows = [
            {
                "name": workload.name,
                "category": workload.category,
                "priority": workload.priority,
                "unit": workload.unit,
                "question": workload.question,
                "min_streams": workload.min_streams,
                "max_streams": workload.max_streams,
            }
            for workload in chosen
        ]
        sys.stdout.buffer.write(to_json(rows) + b"\n")
        return
    from aorta.queues.cli.show import show_list

    show_list(chosen, verbose)
