"""aorta top."""

import sys
import time
from pathlib import Path

import click

from aorta.exit_codes import CANNOT_TELL, FINE


@click.command("top")
@click.argument("run", metavar="RUN", default="artifacts", type=click.Path(path_type=Path))
@click.option(
    "--every-s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Time between two looks."
)
@click.option("--once", is_flag=True, help="Print the table once and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and leave.")
def top_command(run: Path, every_s: float, once: bool, as_json: bool) -> int:
    """Watch the job that records into RUN: a row per rank, medians of its newest 20 steps.

    Reads the files of the folder and nothing else: works over ssh and on a shared file system. The rank
    that the others wait for is red. Ctrl-C leaves. Exit code 3: there is no step yet.
    """
    from rich.console import Console
    from rich.live import Live

    from aorta.errors import AortaError, RecordError
    from aorta.live.follow import Follower
    from aorta.live.table import top_table
    from aorta.records.reader import read_run
    from aorta.records.schema import RunRecord

    def run_record() -> RunRecord | None:
        try:
            return read_run(run)
        except AortaError:
            return None

    if not run.is_dir():
        raise RecordError(f"{run}: no such folder; give the folder of a run")
    follower = Follower(run)
    follower.poll()

    def states() -> list:  # type: ignore[type-arg]
        return [follower.ranks[rank] for rank in sorted(follower.ranks)]

    if as_json:
        click.echo(_json(states()))
        return FINE if follower.ranks else CANNOT_TELL
    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        console.print(top_table(run_record(), states(), height=10_000))
        return FINE if follower.ranks else CANNOT_TELL
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(top_table(run_record(), states(), height=console.height), refresh=True)
            time.sleep(every_s)
            follower.poll()


def _json(states: list) -> str:  # type: ignore[type-arg]
    import msgspec

    from aorta.live.table import straggler

    late = straggler(states)
    names = ("step_ms", "exposed_ms", "comm_ms", "compute_ms", "overlap_ratio")
    ranks = [
        {
            "rank": state.rank,
            "global_step": None if state.last is None else state.last.global_step,
            **{name: state.median(name) for name in names},
        }
        for state in states
    ]
    straggler_row = None if late is None else {"rank": late.rank, "wait_ms": late.wait_ms}
    return msgspec.json.encode({"ranks": ranks, "straggler": straggler_row}).decode()
