"""Tells which run this process belongs to, by the launcher's environment variables alone.

A run is one run over its restarts: under torchrun --max-restarts, over changes of its number of ranks, and
when Slurm queues its job again.
"""

import os
import socket
import uuid
from collections.abc import Mapping

import msgspec

_UNNAMED = frozenset(("", "none"))
"""Names that torchrun gives a job that nobody named."""


CONTINUES = "AORTA_CONTINUES"
"""Variable by which `aorta run --continue` names the run that its command goes on with."""


class RunLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher of a run's processes, as far as it tells one run from another."""

    run_id: str | None = None
    """The user's own name for the run (AORTA_RUN_ID), or the run to go on with; the same is the same run."""
    job: str | None = None
    """The launcher's name of the job: the same for restarts of a run, and for other runs of that name."""
    num_restarts: int = 0
    """The launcher's count. torchrun does not count changes of the number of ranks."""
    num_requeues: int = 0
    """How often Slurm has queued the job again; torchrun restarts its own count each time."""
    agent: str | None = None
    """Host, pid and start of the parent process: one agent starts one run."""


def launch_of(environ: Mapping[str, str] | None = None) -> RunLaunch:
    environ = os.environ if environ is None else environ
    torchrun, slurm = environ.get("TORCHELASTIC_RUN_ID"), environ.get("SLURM_JOB_ID")
    job = None
    if torchrun is not None and torchrun.lower() not in _UNNAMED and not (slurm and _is_drawn(torchrun)):
        job = f"torchrun {torchrun}"
    elif slurm:
        # The job's name tells its steps apart: each is another run. Elements of an array have ids of their
        # own.
        job = f"slurm {slurm} {environ.get('SLURM_JOB_NAME', '')}".rstrip()
    return RunLaunch(
        run_id=environ.get(CONTINUES) or environ.get("AORTA_RUN_ID") or None,
        job=job,
        num_restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
        num_requeues=_number(environ, "SLURM_RESTART_COUNT"),
        agent=_parent() if torchrun is not None else None,
    )


def given_name() -> str | None:
    """The name that the user gave the run or the job; None for names that a launcher has drawn."""
    torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if torchrun.lower() in _UNNAMED or _is_drawn(torchrun):
        torchrun = ""
    return os.environ.get("AORTA_RUN_ID") or torchrun or os.environ.get("SLURM_JOB_NAME") or None


def continues(launch: RunLaunch, earlier: RunLaunch) -> bool:
    """Return True where this launch surely continues the run of the earlier one."""
    if launch.run_id is not None or earlier.run_id is not None:
        return launch.run_id == earlier.run_id
    if launch.agent is not None and launch.agent == earlier.agent:
        return True
    counts, earlier_counts = ((each.num_requeues, each.num_restarts) for each in (launch, earlier))
    return launch.job is not None and launch.job == earlier.job and counts > earlier_counts


def may_continue(launch: RunLaunch, earlier: RunLaunch) -> bool:
    """Return True where both jobs have one name: whether it is one job, their agents must tell."""
    nobody_named_it = launch.run_id is None and earlier.run_id is None
    return nobody_named_it and launch.job is not None and launch.job == earlier.job


def new_run_id(launch: RunLaunch) -> str:
    """The user's name for the run, else a random one."""
    return launch.run_id or uuid.uuid4().hex[:16]


def derived_run_id(launch: RunLaunch) -> str:
    """A run id for ranks that cannot ask each other: equal where the launcher tells them the same."""
    environ = os.environ
    words = [launch.job, environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")]
    if launch.job is None and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        words.append(launch.agent)  # all ranks are on one machine and have one parent
    return launch.run_id or uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(map(str, words))).hex[:16]


def process_start(pid: int) -> float | None:
    """Unix time at which the process began; None where there is none. With the pid it names a process."""
    import psutil  # here: loading it takes as long as a tenth of a report

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.Error:
        return None


def is_stopped(pid: int, start: float | None) -> bool:
    """Return True where the process with this pid and start is stopped (SIGSTOP, SIGTSTP)."""
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
    """Return True for a random name, as torchrun --standalone makes one for every launch."""
    try:
        return str(uuid.UUID(name)) == name.lower()
    except ValueError:
        return False


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
