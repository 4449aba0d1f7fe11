"""Which run do these processes belong to? What the launcher tells, in the environment alone.

A run is one run over its restarts: under torchrun --max-restarts, over changes of its number of ranks, and
when Slurm queues its job again.
"""

import os
import socket
import uuid
from collections.abc import Mapping

import msgspec

_UNNAMED = frozenset(("", "none"))
"""What torchrun calls a job that nobody named."""


class RunLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What started the processes of a run."""

    run_id: str | None = None
    """The user's own name for the run (AORTA_RUN_ID); the same name is the same run."""
    job: str | None = None
    """Of the launcher: the same for restarts of a run, and possibly for another run of the same name."""
    num_restarts: int = 0
    """As the launcher counts. Changes of the number of ranks are not counted by torchrun."""
    num_requeues: int = 0
    """How often Slurm has queued the job again; torchrun counts from 0 each time."""
    agent: str | None = None
    """Host, process and start of what started this process: the same agent starts one run."""


def launch_of(environ: Mapping[str, str] | None = None) -> RunLaunch:
    environ = os.environ if environ is None else environ
    torchrun, slurm = environ.get("TORCHELASTIC_RUN_ID"), environ.get("SLURM_JOB_ID")
    job = None
    if torchrun is not None and torchrun.lower() not in _UNNAMED and not (slurm and _is_drawn(torchrun)):
        job = f"torchrun {torchrun}"
    elif slurm:
        # Of a job array each element has an id of its own; of a job's steps each is another run.
        job = f"slurm {slurm} {environ.get('SLURM_JOB_NAME', '')}".rstrip()
    return RunLaunch(
        run_id=environ.get("AORTA_RUN_ID") or None,
        job=job,
        num_restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
        num_requeues=_number(environ, "SLURM_RESTART_COUNT"),
        agent=_parent() if torchrun is not None else None,
    )


def continues(launch: RunLaunch, earlier: RunLaunch) -> bool:
    """Whether processes of this launch go on with the run of the earlier one."""
    if launch.run_id is not None or earlier.run_id is not None:
        return launch.run_id == earlier.run_id
    if launch.agent is not None and launch.agent == earlier.agent:
        return True
    counts, earlier_counts = ((each.num_requeues, each.num_restarts) for each in (launch, earlier))
    return launch.job is not None and launch.job == earlier.job and counts > earlier_counts


def may_continue(launch: RunLaunch, earlier: RunLaunch) -> bool:
    """Whether they are of jobs of one name, and it is for their agents to tell whether it is one job."""
    nobody_named_it = launch.run_id is None and earlier.run_id is None
    return nobody_named_it and launch.job is not None and launch.job == earlier.job


def new_run_id(launch: RunLaunch) -> str:
    return launch.run_id or uuid.uuid4().hex[:16]


def derived_run_id(launch: RunLaunch, environ: Mapping[str, str] | None = None) -> str:
    """The same on every rank that the launcher tells the same, for ranks that cannot ask each other."""
    environ = os.environ if environ is None else environ
    words = [launch.job, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")]
    if launch.job is None and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        words.append(launch.agent)  # of one machine
    return launch.run_id or uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(map(str, words))).hex[:16]


def process_start(pid: int) -> float | None:
    """Unix time at which the process began; None where there is none. With the pid it names a process."""
    import psutil  # takes as long to load as a tenth of a report

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_stopped(pid: int, start: float | None) -> bool:
    """Whether the process that began then is stopped by a signal (SIGSTOP, SIGTSTP)."""
    import psutil

    try:
        process = psutil.Process(pid)
        is_same_process = start is not None and abs(process.create_time() - start) < 1.0
        return bool(is_same_process and process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _parent() -> str:
    pid = os.getppid()
    return f"{socket.gethostname()} {pid} {process_start(pid)}"


def _is_drawn(name: str) -> bool:
    """Whether torchrun --standalone drew the job's name by lot, another one in every launch."""
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
