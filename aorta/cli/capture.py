"""aorta capture."""

import os
import time
from pathlib import Path

import click

from aorta.errors import RecordError
from aorta.exit_codes import CANNOT_TELL, FINE


@click.command("capture")
@click.argument("run", metavar="RUN", default="artifacts", type=click.Path(path_type=Path))
@click.option(
    "--steps", "num_steps", type=click.IntRange(1), default=3, show_default=True, help="Steps to trace."
)
@click.option(
    "--timeout-s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    help="Wait that long for the traces; 0: ask and leave.",
)
def capture_command(run: Path, num_steps: int, timeout_s: float) -> int:
    """Ask the running job that records into RUN to trace its next steps.

    The request is a file in RUN; no port is opened. All ranks whose RUN is this folder trace the same
    steps and write torch_profiler/rank<n>/capture_<id>.json.gz, which Perfetto and aorta report read.
    Exit code 3: no trace came within --timeout-s.
    """
    from aorta.records.reader import read_run
    from aorta.records.requests import CaptureRequest, ask_for_capture, read_plan, trace_name

    record = read_run(run)
    if record.finished_unix_ns is not None:
        raise RecordError(f"the job of {run} has ended: no step is left to trace")
    request = CaptureRequest(id=f"{time.time_ns():x}-{os.getpid()}", num_steps=num_steps)
    try:
        ask_for_capture(run, request)
    except OSError as error:
        raise RecordError(f"cannot write into {run}: {error.strerror}") from None
    if timeout_s == 0:
        click.echo(f"asked for {num_steps} steps")
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
            f"error: no answer within {timeout_s:g} s: is the job of {run} running, with aorta?", err=True
        )
    else:
        click.echo(
            f"error: {len(paths) - len(written)} of {len(paths)} ranks wrote no trace here within "
            f"{timeout_s:g} s",
            err=True,
        )
    return CANNOT_TELL
