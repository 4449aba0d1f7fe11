"""python -m aorta.hw_queue_eval probe."""

import sys

import click
import torch


@click.command("probe")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def probe_command(as_json: bool) -> None:
    """How many hardware queues, who shares one, switch cost, priorities."""
    if not torch.cuda.is_available():
        click.echo("error: probe needs a GPU, and torch sees none", err=True)
        sys.exit(2)
