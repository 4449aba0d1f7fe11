"""aorta sweep."""

from pathlib import Path

import click


@click.command("sweep")
@click.argument("sweep", metavar="SWEEP.yaml", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Folder; default artifacts/sweeps/<name>.")
@click.option("--retry-failed", is_flag=True, help="Run trials again that failed before.")
@click.option("--list", "only_list", is_flag=True, help="Say what would be run, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else.")
def sweep_command(
    sweep: Path, output: Path | None, retry_failed: bool, only_list: bool, as_json: bool
) -> int:
    """Train once per combination of settings and environment variables, and tell which is best.

    The same command again goes on where it was interrupted. Exit code 1: some trials failed.
    """
    from aorta.sweep.command import sweep as run

    return run(sweep, output, retry_failed, only_list, as_json)
