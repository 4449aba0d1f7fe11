"""aorta top, capture, hang and merge: commands on the folder of a job that runs, hangs or has ended."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from aorta.cli.options import PATH, NumberRange, comm_rules_option, json_option
from aorta.command_line import OneScreenCommand
from aorta.errors import CANNOT_TELL, FINE, VIOLATED, ConfigError, RecordError

if TYPE_CHECKING:
    from rich.console import Group

    from aorta.account.model import Goodput
    from aorta.account.newest import Newest
    from aorta.account.watch import Alarm
    from aorta.records.digests import Slots
    from aorta.records.schema import RunRecord

MOST_LISTED = 64
"""Rows of `aorta top --once`."""
EVERY_S = 1.0
"""Time between two looks at the files."""
POST_S = 10.0
"""Limit of one post of an alarm."""
RESTARTS_WITHIN_S = 120.0
"""Time after which a job whose ranks have all ended is over, though nobody wrote that."""
GOODPUT_EVERY_S = 60.0
"""Every line of a rank is read for it."""
run_folder = click.argument("run", metavar="[RUN]", default="artifacts", type=PATH)


# ---- top -----------------------------------------------------------------------------------------


@click.command("top", cls=OneScreenCommand)
@run_folder
@click.option("--once", is_flag=True, help="Print the table once and leave.")
@click.option(
    "--alarm",
    metavar="exit|FILE|URL",
    help="Tell of a straggler, a slow-down, a hang.",
)
@json_option
def top_command(run: Path, once: bool, alarm: str | None, as_json: bool) -> int:
    """Watch the job that records into RUN (artifacts): a row per rank, means of its newest 20 steps.

    Reads only the files of the folder, so it works over ssh and on a shared file system. The rank that the
    others wait for is red. Ctrl-C leaves. Exit code 3: the run has no step yet.

    --alarm watches without a screen until the job has ended. exit: leave at the first alarm, exit code 1.
    FILE: append each as a line of JSON. URL: post it there.
    """
    from rich.console import Console
    from rich.live import Live

    from aorta.account.load.goodput import goodput_of_folder
    from aorta.page.top import top_table

    if not run.is_dir():
        raise RecordError(f"{run}: no such folder; give the folder that a job records into")
    if alarm is not None:
        if once or as_json:
            raise ConfigError("--alarm goes on watching: it goes with neither --once nor --json")
        return _raise_alarms(run, alarm)
    look, record = _looks(run), _run_record(run)
    if record is None and not look(1).newest.ranks:
        raise RecordError(f"{run}: no run is recorded there; give the folder that a job records into")
    parts = goodput_of_folder(run, record)
    if as_json:
        _, shown, damage, _ = look(None)
        click.echo(_top_json(shown, damage or ([] if shown.ranks else ["no step yet"]), parts))
        return FINE if shown.ranks else CANNOT_TELL
    console = Console(highlight=False)

    def screen(height: int) -> "tuple[Group, bool]":
        _, shown, damage, _ = look(height)
        table = top_table(_run_record(run), shown, height=height, damage=damage, goodput=parts)
        return table, bool(shown.ranks)

    if once or not sys.stdout.isatty():
        table, has_steps = screen(MOST_LISTED + 6)
        console.print(table)
        return FINE if has_steps else CANNOT_TELL
    with Live(console=console, auto_refresh=False, screen=True) as live:
        looked_s = time.monotonic()
        while True:
            live.update(screen(console.height)[0], refresh=True)
            time.sleep(EVERY_S)
            if time.monotonic() > looked_s + GOODPUT_EVERY_S:
                parts, looked_s = goodput_of_folder(run, _run_record(run)), time.monotonic()


class _Look(NamedTuple):
    """One look at the job. Of many ranks newest lists those that tell most."""

    slots: "Slots"
    newest: "Newest"
    damage: list[str]
    is_by_lines: bool


def _looks(run: Path) -> "Callable[[int | None], _Look]":
    """Returns what looks at the job. It takes the number of rows that are shown of many ranks; None: all."""
    from aorta.account.newest import newest
    from aorta.account.watch import MOST_FOLLOWED, damage_of, newest_of
    from aorta.records.digests import read_digests
    from aorta.records.newest import Follower
    from aorta.why.causes.rank import late_rank

    follower = Follower(run)

    def look(height: int | None) -> _Look:
        slots = read_digests(run)
        if len(slots) > MOST_FOLLOWED:
            return _Look(slots, newest_of(slots, height), damage_of(slots), False)
        follower.poll()
        return _Look(slots, newest(follower.ranks.values(), late_rank), follower.damage(), True)

    return look


def _run_record(run: Path) -> "RunRecord | None":
    from aorta.errors import AortaError
    from aorta.records.reader import read_run

    try:
        return read_run(run)
    except AortaError:
        return None


def _raise_alarms(run: Path, target: str) -> int:
    """Watch until the job has ended; until the first alarm where target is exit."""
    from aorta.account.watch import Watch

    send = _sender(target)
    look = _looks(run)
    watch = Watch()
    ended_s: float | None = None
    while True:
        slots, newest, _, is_by_lines = look(1)
        late = [newest.late] if newest.late is not None else []
        for alarm in watch.look(slots, time.monotonic(), time.time_ns(), late if is_by_lines else None):
            click.echo(f"{alarm.kind} at step {alarm.global_step}: {alarm.text}")
            if target == "exit":
                return VIOLATED
            send(alarm)
        record = _run_record(run)
        if record is not None and record.finished_unix_ns is not None:
            return FINE if len(slots) or newest.ranks else CANNOT_TELL
        if not len(slots) or not slots["is_closed"].all():
            ended_s = None
        elif ended_s is None:
            ended_s = time.monotonic()
        elif time.monotonic() - ended_s > RESTARTS_WITHIN_S:  # every rank was killed, and none came back
            return FINE
        time.sleep(EVERY_S)


def _sender(target: str) -> "Callable[[Alarm], None]":
    """What tells the target of an alarm. One that cannot be told is a line on stderr: watching goes on."""
    from http.client import HTTPException
    from urllib.parse import urlsplit

    import msgspec

    from aorta.files import regular_descriptor

    def post(alarm: "Alarm") -> None:
        from urllib.request import Request, urlopen

        head = {"Content-Type": "application/json"}
        urlopen(Request(target, msgspec.json.encode(alarm), head), timeout=POST_S).close()

    def append(alarm: "Alarm") -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with open(regular_descriptor(Path(target), flags), "ab") as file:
            file.write(msgspec.json.encode(alarm) + b"\n")

    is_url = target.startswith(("http://", "https://"))
    if is_url and not _has_host(target):
        raise ConfigError("--alarm: the address names no host and port")
    if not is_url and target != "exit" and not Path(target).absolute().parent.is_dir():
        raise ConfigError(f"--alarm {target}: there is no folder {Path(target).parent}")
    if not is_url and Path(target).is_dir():
        raise ConfigError(f"--alarm {target}: is a folder; a file, exit or an address would work")

    def send(alarm: "Alarm") -> None:
        try:
            (post if is_url else append)(alarm)
        except (OSError, ValueError, HTTPException) as error:
            place = urlsplit(target).hostname if is_url else target  # the rest of an address may be a secret
            click.echo(f"top: cannot tell {place} of an alarm: {error}", err=True)

    return send


def _has_host(address: str) -> bool:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _top_json(shown: "Newest", damage: list[str], parts: "Sequence[Goodput]") -> str:
    import msgspec

    names = ("step_ms", "recorded_step_ms", "compute_ms", "exposed_ms", "idle_ms", "exposed_wait_ms",
             "caused_ms", "comm_ms", "overlap_ratio")  # fmt: skip
    ranks = [
        {
            "rank": rank.rank,
            "global_step": rank.last.global_step,
            "num_steps": rank.num_steps,
            **{name: getattr(rank, name) for name in names},
        }
        for rank in shown.ranks
    ]
    late = shown.late
    straggler_row = None if late is None else {"rank": late.rank, "wait_ms": late.wait_ms}
    body = {"ranks": ranks, "straggler": straggler_row, "damage": damage, "goodput": parts}
    return msgspec.json.encode(body).decode()


# ---- capture -------------------------------------------------------------------------------------


@click.command("capture", cls=OneScreenCommand)
@run_folder
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(1),
    metavar="N",
    default=3,
    show_default=True,
    help="Number of steps to trace.",
)
@click.option(
    "--timeout-s",
    type=NumberRange(0),
    metavar="SECONDS",
    default=300.0,
    help="Wait that long (300); 0: ask and leave.",
)
def capture_command(run: Path, num_steps: int, timeout_s: float) -> int:
    """Ask the job that records into RUN (artifacts) to trace the kernels of its next steps.

    The request is a file in RUN; no port is opened. All ranks whose RUN is this folder trace the same
    steps and write torch_profiler/rank<n>/capture_<id>.json.gz, which Perfetto and aorta report read.
    Exit code 3: no trace came within --timeout-s.
    """
    from aorta.records.reader import read_run
    from aorta.records.requests import MOST_STEPS, ask_for_capture, new_request, read_plan, trace_name

    if num_steps > MOST_STEPS:
        raise ConfigError(
            f"--steps takes at most {MOST_STEPS}, got {num_steps}: traces take megabytes a step"
        )
    record = read_run(run)
    if record.finished_unix_ns is not None:
        raise RecordError(f"the job that recorded into {run} has ended: no step is left to trace")
    request = new_request(num_steps)
    try:
        ask_for_capture(run, request)
    except OSError as error:
        raise RecordError(f"cannot write into {run}: {error.strerror}") from None
    if timeout_s == 0:
        click.echo(f"asked for a trace of {num_steps} steps")
        return FINE
    paths = [run / trace_name(request.id, rank) for rank in range(record.world_size)]
    deadline_s = time.monotonic() + timeout_s
    planned = False
    while time.monotonic() < deadline_s:
        plan = read_plan(run)
        if plan is not None and plan.id == request.id and not planned:
            planned = True
            click.echo(
                f"steps {plan.first_step} to {plan.first_step + num_steps - 1} will be traced", err=True
            )
        if all(path.exists() for path in paths):
            break
        time.sleep(0.2)
    written = [path for path in paths if path.exists()]
    for path in written:
        click.echo(f"wrote {path}")
    if len(written) == len(paths):
        return FINE
    if not planned:
        click.echo(
            f"error: no answer within {timeout_s:g} s: does a running job record into {run}?", err=True
        )
    else:
        click.echo(
            f"error: {len(paths) - len(written)} of {len(paths)} ranks wrote no trace into {run} within "
            f"{timeout_s:g} s",
            err=True,
        )
    return CANNOT_TELL


# ---- hang ----------------------------------------------------------------------------------------


@click.command("hang", cls=OneScreenCommand)
@run_folder
@json_option
def hang_command(run: Path, as_json: bool) -> int:
    """Name the rank and the collective that the other ranks of a stuck job wait for.

    RUN (artifacts) is the folder of a job whose watchdog wrote reports: `aorta run --hang`.
    """
    from aorta.hang.show import show

    show(run, as_json)
    return FINE


# ---- merge ---------------------------------------------------------------------------------------


@click.command("merge", cls=OneScreenCommand)
@run_folder
@comm_rules_option
def merge_command(run: Path, comm_rules: Path | None) -> int:
    """Add the numbers of kernel traces beside a run's records to those records.

    RUN (artifacts) holds traces in rank<n>/ (rocprofv3, Nsight Systems) or in torch_profiler/rank<n>/. A
    second merge adds nothing.
    """
    from aorta.merge.command import merge, table
    from aorta.traces.classify import load_rules

    faults: list[str] = []
    merged = merge(run, faults, load_rules(comm_rules))
    for fault in faults:
        click.echo(f"merge: {fault}", err=True)
    click.echo("\n".join(table(merged)))
    return FINE
