"""Which run do these processes belong to? What the launcher tells, in the environment alone.

A run is one run over its restarts: under torchrun --max-restarts, over changes of its number of ranks, and
when Slurm queues its job again.
"""

import os
import socket
import uuid
from collections.abc import Mapping

import msgspec
import psutil

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
    agent: str | None = None
    """Host, process and start of what started this process: the same agent starts one run."""


def launch_of(environ: Mapping[str, str] | None = None) -> RunLaunch:
    environ = os.environ if environ is None else environ
    torchrun, slurm = environ.get("TORCHELASTIC_RUN_ID"), environ.get("SLURM_JOB_ID")
    job = None
    if torchrun is not None and torchrun.lower() not in _UNNAMED:
        job = f"torchrun {torchrun}"
    elif slurm:
        # Of a job array each element has an id of its own; of a job's steps each is another run.
        job = f"slurm {slurm} {environ.get('SLURM_JOB_NAME', '')}".rstrip()
    restarts = (_number(environ, name) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return RunLaunch(
        run_id=environ.get("AORTA_RUN_ID") or None,
        job=job,
        num_restarts=sum(restarts),
        agent=_parent() if torchrun is not None else None,
    )


def continues(launch: RunLaunch, earlier: RunLaunch) -> bool:
    """Whether processes of this launch go on with the run of the earlier one."""
    if launch.run_id is not None or earlier.run_id is not None:
        return launch.run_id == earlier.run_id
    if launch.agent is not None and launch.agent == earlier.agent:
        return True
    return launch.job is not None and launch.job == earlier.job and launch.num_restarts > earlier.num_restarts


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
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_stopped(pid: int, start: float | None) -> bool:
    """Whether the process that began then is stopped by a signal (SIGSTOP, SIGTSTP)."""
    try:
        process = psutil.Process(pid)
        is_same_process = start is not None and abs(process.create_time() - start) < 1.0
        return bool(is_same_process and process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _parent() -> str:
    pid = os.getppid()
    return f"{socket.gethostname()} {pid} {process_start(pid)}"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
