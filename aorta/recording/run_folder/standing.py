"""rank_<n>_state.jsonl, as the training process writes it: that it lives, where it is, how it ended."""

import os
import signal
import socket
import time
from pathlib import Path

import msgspec

from aorta.recording.run_folder.place import Claim
from aorta.records.files import state_name
from aorta.records.run_identity import process_start
from aorta.records.schema import Ending
from aorta.records.state import HEARTBEAT_S, ProcessState, StateFile, first_line


class Standing:
    """Of one rank in one attempt. Writes at the start, every HEARTBEAT_S and at the end."""

    def __init__(self, folder: Path, claim: Claim, rank: int, world_size: int) -> None:
        self._file = StateFile(folder / state_name(rank), 0)
        now_ns = time.time_ns()
        self._state = ProcessState(
            run_id=claim.run_id,
            attempt=claim.attempt,
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            started_unix_ns=now_ns,
            written_unix_ns=now_ns,
        )
        self._written_s = time.monotonic()
        self._first_step: int | None = None
        self._begun_step: int | None = None
        self._ending: Ending | None = None
        self._file.write(self._state)

    def written_by(self, pid: int) -> None:
        """Another process writes the rank's lines."""
        self._state = msgspec.structs.replace(self._state, writer_pid=pid, writer_start=process_start(pid))
        self._write()

    def begin(self, global_step: int) -> None:
        """The rank begins this step."""
        self._begun_step = global_step
        if self._first_step is None:
            self._first_step = global_step
            self._write()

    def beat(self) -> None:
        """Say that the rank lives, where that is due."""
        if time.monotonic() - self._written_s >= HEARTBEAT_S:
            self._write()

    def end(self, ending: Ending) -> None:
        """The first ending is the one."""
        if self._ending is None:
            self._ending = ending
            self._write()
            self._file.close()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        self._file.write(
            msgspec.structs.replace(
                self._state,
                written_unix_ns=time.time_ns(),
                first_step=self._first_step,
                begun_step=self._begun_step,
                ending=self._ending,
            )
        )


def ending_of(error: BaseException | None) -> Ending:
    """What it means for the run that its code was left with this exception."""
    now_ns = time.time_ns()
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Ending(kind="finished", unix_ns=now_ns)
    if isinstance(error, KeyboardInterrupt):
        return Ending(kind="stopped", why=signal.Signals.SIGINT.name, unix_ns=now_ns)
    return Ending(kind="crashed", why=first_line(error), unix_ns=now_ns)
