"""aorta check: run a command, and find operations of its training that nothing orders."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.cli.options import PATH, output_option
from aorta.cli.run import check_start, run_to_end
from aorta.command_line import OneScreenCommand, discard_output
from aorta.errors import CANNOT_TELL, FINE, VIOLATED
from aorta.launcher import is_first_launch

if TYPE_CHECKING:
    from aorta.hazards.findings import Checked


@click.command("check", cls=OneScreenCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@output_option(default=Path("artifacts"), file_okay=False, help="Folder of the records; default: artifacts.")
@click.option(
    "--every",
    type=click.IntRange(2),
    metavar="N",
    default=20,
    help="Check two steps of every N; default: 20.",
)
@click.option("--confirm/--no-confirm", default=True, help="Delay findings to confirm them (default).")
@click.option(
    "--except",
    "exceptions",
    type=PATH,
    metavar="FILE",
    help="Findings known to be harmless, as YAML.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["confirmed", "possible"]),
    default="confirmed",
    metavar="STATUS",
    help="confirmed (default) or possible: exit code 1.",
)
@click.option("--step-at", metavar="MODULE:FUNCTION", help="Calls of this function are the steps.")
@click.option("--all", "show_all", is_flag=True, help="Show all findings.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def check_command(
    output: Path,
    every: int,
    confirm: bool,
    exceptions: Path | None,
    fail_on: str,
    step_at: str | None,
    show_all: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND and find accesses to the same memory that no wait orders.

    aorta check -- torchrun --nproc_per_node 8 train.py --my-option

    Says both places, the order that is missing, and whether a delay confirms it. The program computes what
    it computes without. Exit code: the command's; if that is 0, then 1 where something was confirmed.
    What is found and what cannot be seen: docs/check.md.
    """
    from aorta.attach.settings import AttachSettings, environment_for
    from aorta.hazards.exceptions import Exceptions
    from aorta.records.deaths import signal_name

    Exceptions.shipped(exceptions)  # a mistake in the file is told before anything runs
    check_start(command, output, step_at)
    settings = AttachSettings(
        output=str(output.absolute()),
        step_at=step_at,
        check_every=every,
        check_confirm=confirm,
        check_exceptions=None if exceptions is None else str(exceptions.absolute()),
    )
    began_ns = time.time_ns()
    status = run_to_end(list(command), environment_for(settings, dict(os.environ)))
    if not is_first_launch():
        return status
    if status:
        by = f" ({signal_name(status - 128)})" if status > 128 else ""
        click.echo(f"aorta: the command ended with exit code {status}{by}", err=True)
    try:
        found = show(output, began_ns, show_all, as_json, fail_on)
    except BrokenPipeError:
        discard_output()
        return status
    return status or found


def show(folder: Path, began_ns: int, show_all: bool, as_json: bool, fail_on: str) -> int:
    """Print what the ranks of a run found since began_ns; return the exit code that it asks for."""
    from aorta.hazards.findings import read_checked
    from aorta.records.files import hazards_name

    all_checked = [
        checked
        for checked in read_checked(folder)
        if (folder / hazards_name(checked.rank)).stat().st_mtime_ns >= began_ns
    ]
    if not any(checked.steps for checked in all_checked):
        click.echo(
            f"aorta: nothing was checked in {folder}: no process that aorta reached trained three steps with "
            "torch (docs/run.md says whom it cannot reach)",
            err=True,
        )
        return CANNOT_TELL
    print_checked(all_checked, as_json, show_all)
    return code_of(all_checked, fail_on)


def print_checked(all_checked: "Sequence[Checked]", as_json: bool, show_all: bool) -> None:
    """Print findings as text or as JSON."""
    import msgspec

    from aorta.hazards.text import checked_text

    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(all_checked)).decode())
    else:
        click.echo(checked_text(all_checked, show_all))


def code_of(all_checked: "Sequence[Checked]", fail_on: str) -> int:
    """Exit code for what was found: 1 for findings of the status, and for wrong numbers."""
    from aorta.hazards.findings import merged

    failing = ("confirmed",) if fail_on == "confirmed" else ("confirmed", "possible")
    is_wrong = any(checked.differences for checked in all_checked)
    return VIOLATED if is_wrong or any(f.status in failing for f in merged(all_checked)) else FINE
