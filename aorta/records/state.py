"""rank_<n>_state.jsonl: where a rank stands and how it ended, for whoever reads the folder from outside.

Two lines of JSON of a fixed size, written in place, so that a full disk takes them too: what the training
process knows of itself, and what was written of its steps, by the process that writes them.
"""

import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from aorta.errors import NOT_JSON
from aorta.files import open_regular, regular_descriptor
from aorta.records.digests import Digest
from aorta.records.files import STATE_FILE, state_name, steps_name
from aorta.records.reader import last_line
from aorta.records.run_identity import process_start
from aorta.records.schema import Ending, PositionSource, StepRecord
from aorta.records.seal import encoded
from aorta.records.secrets import redacted

PAGE_BYTES = 2048
"""Size of each of the two lines."""
HEARTBEAT_S = 10.0
"""Seconds between two signs of life of a rank."""
SILENT_S = 60.0
"""Seconds without a sign of life after which a rank of another machine may be dead."""

SUMS = ("step_ms", "comm_ms", "compute_ms", "hidden_ms", "exposed_ms", "idle_ms")
"""Numbers of steps whose sums a Tally keeps."""
_MOST_TEXT = 500
_BLANK = (b" " * (PAGE_BYTES - 1) + b"\n") * 2
# O_NOFOLLOW: a link left there would have its target overwritten.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW

MOST_SAVES = 12
"""Saves that are kept of a rank, besides where its first attempt began."""

State = TypeVar("State", bound=msgspec.Struct)


class Save(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint that the program wrote, or the parameters with which an attempt began."""

    position: int
    """Global step that training went on with from there."""
    mark: str
    """What tells it from others (aorta.attach.position)."""
    optimizer_steps: int | None = None


def kept_saves(saves: Iterable[Save]) -> list[Save]:
    """Each once: the beginning, as this rank and rank 0 know it, and the latest ones."""
    each = list(dict.fromkeys(saves))
    begin = min(save.position for save in each)
    first = [save for save in each if save.position == begin][:2]
    return [*first, *[save for save in each if save not in first][-MOST_SAVES:]]


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """First line: written by the training process about itself."""

    run_id: str | None
    attempt: int
    rank: int
    world_size: int
    host: str
    pid: int
    process_start: float | None
    started_unix_ns: int
    written_unix_ns: int
    first_step: int | None = None
    """First global step of this attempt."""
    begun_step: int | None = None
    position_by: PositionSource | None = None
    """Who told first_step (PositionSource); None: nobody, it was counted on."""
    saves: list[Save] = []
    """Of this attempt and those before it, so that a later one knows from where it goes on."""
    writer_pid: int | None = None
    """Process that writes this rank's lines, where it is another one: it may outlive the rank."""
    writer_start: float | None = None
    launches: list[str] = []
    """Names of the files of the launches that it is of, and those that earlier attempts were of."""
    ending: Ending | None = None


class LinesState(msgspec.Struct, frozen=True, kw_only=True):
    """Second line: what was written of the rank's steps in this attempt."""

    attempt: int
    last_step: int | None = None
    """The latest global step that was handed over to be written."""
    num_steps: int = 0
    num_lost: int = 0
    """Steps without a line."""
    why_lost: str | None = None
    sums: dict[str, float] = {}
    """Sums over all steps by name in SUMS, including steps without a line."""
    tokens: int = 0
    closed_unix_ns: int | None = None
    """When no more steps came."""
    ending: Ending | None = None
    """How the process ended that left no word, as the kernel told."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessState
    lines: LinesState | None

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def is_alive(self) -> bool | None:
        """True while its process runs; None where it cannot be seen and has been silent for SILENT_S."""
        process = self.process
        if process.host == socket.gethostname():
            return _runs(process.pid, process.process_start)
        return True if time.time_ns() - process.written_unix_ns < SILENT_S * 1e9 else None

    @property
    def has_writer(self) -> bool:
        """True while a process of this machine still writes its lines."""
        process = self.process
        if process.writer_pid is None or process.host != socket.gethostname():
            return False
        # A writer without a start had ended before its start could be read.
        return process.writer_start is not None and _runs(process.writer_pid, process.writer_start)


def _runs(pid: int, start: float | None) -> bool:
    """Return True while a process with this pid and start runs. start None: any with the pid."""
    now = process_start(pid)
    return now is not None and (start is None or abs(now - start) < 1.0)


# -- writing -------------------------------------------------------------------------------------------


class StateFile:
    """One of the two lines, written over and over. Never raises OSError."""

    def __init__(self, path: Path, place: int) -> None:
        """place: 0 for the training process, 1 for the process that writes lines."""
        self._path = path
        self._offset = place * PAGE_BYTES
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = regular_descriptor(path, _FLAGS)
            if place == 0:
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, _BLANK, 0)

    def write(self, state: ProcessState | LinesState) -> None:
        data = encoded(state)
        while isinstance(state, ProcessState) and len(data) >= PAGE_BYTES and state.saves:
            state = msgspec.structs.replace(state, saves=state.saves[1:])
            data = encoded(state)
        if len(data) >= PAGE_BYTES:
            return
        with suppress(OSError):
            if self._descriptor is None:  # closed, or there was none
                self._descriptor = regular_descriptor(self._path, _FLAGS)
            if os.fstat(self._descriptor).st_nlink == 0:  # somebody has removed it
                self._path.parent.mkdir(parents=True, exist_ok=True)
                os.close(self._descriptor)
                self._descriptor = None
                self._descriptor = regular_descriptor(self._path, _FLAGS)
                if os.fstat(self._descriptor).st_size == 0:
                    os.pwrite(self._descriptor, _BLANK, 0)
            os.pwrite(self._descriptor, data.ljust(PAGE_BYTES - 1) + b"\n", self._offset)

    def close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                os.fsync(self._descriptor)
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


class Tally:
    """Counts a rank's steps and keeps their sums on disk, whatever becomes of the lines."""

    def __init__(self, path: Path, attempt: int, every_s: float = 1.0) -> None:
        self._file = StateFile(path, 1)
        self._digest = Digest(path.parent)
        self._attempt = attempt
        self._every_s = every_s
        self._written_s = -every_s
        self._last_step: int | None = None
        self._num_steps = self._num_lost = self._tokens = 0
        self._reason_lost: str | None = None
        self._sums = dict.fromkeys(SUMS, 0.0)

    def add(self, record: StepRecord, why_lost: str | None) -> None:
        """Count a step. why_lost: None where its line is in the file."""
        self._tokens += record.tokens or 0
        for name in SUMS[1:]:
            self._sums[name] += getattr(record.overlap, name) or 0.0
        self._digest.add(record)
        self.add_lengths(record.global_step, [record.step_ms or 0.0], record.end_unix_ns, why_lost)

    def add_lengths(
        self, last_step: int, lengths_ms: Sequence[float], end_unix_ns: int, why_lost: str | None
    ) -> None:
        """Count steps in a row, of which only their lengths are known. end_unix_ns: of the last one."""
        num_steps = len(lengths_ms)
        self._digest.add_lengths(last_step, lengths_ms, end_unix_ns)
        self._last_step = last_step
        self._num_steps += num_steps
        if why_lost is not None:
            self._num_lost += num_steps
            self._reason_lost = why_lost
        self._sums["step_ms"] += sum(lengths_ms)
        now_s = time.monotonic()
        if now_s - self._written_s >= self._every_s:  # not after each of a thousand steps a second
            self._written_s = now_s
            self._write(None)
            self._digest.write()

    def close(self, ending: Ending | None = None) -> None:
        """Write the last sums. ending: of the training process, where it left no word."""
        self._write(time.time_ns() if ending is None else ending.unix_ns, ending)
        self._file.close()
        self._digest.close()

    def _write(self, closed_unix_ns: int | None, ending: Ending | None = None) -> None:
        self._file.write(
            LinesState(
                attempt=self._attempt,
                last_step=self._last_step,
                num_steps=self._num_steps,
                num_lost=self._num_lost,
                why_lost=self._reason_lost,
                sums=self._sums,
                tokens=self._tokens,
                closed_unix_ns=closed_unix_ns,
                ending=ending,
            )
        )


def first_line(error: BaseException) -> str:
    """Type and first line of an exception's message, without secrets."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return redacted(f"{name}: {text}" if text else name)[:_MOST_TEXT]


# -- reading -------------------------------------------------------------------------------------------


def read_states(folder: Path | str) -> dict[int, RankState]:
    """The ranks' states by rank, without those that cannot be read: a state helps, no more."""
    states: dict[int, RankState] = {}
    try:
        paths = [path for path in Path(folder).iterdir() if STATE_FILE.fullmatch(path.name)]
    except OSError:
        return states
    for path in sorted(paths):
        state = read_state(path)
        if state is not None and state_name(state.rank) == path.name:
            states[state.rank] = state
    return states


def states_of(folder: Path, run_id: str, attempt: int) -> list[RankState]:
    """Read the states that the ranks of one attempt wrote."""
    return [
        state
        for state in read_states(folder).values()
        if (state.process.run_id, state.process.attempt) == (run_id, attempt)
    ]


def read_state(path: Path) -> RankState | None:
    """A rank's state; None where it cannot be read."""
    for _ in range(3):  # it may be half written at this moment
        try:
            with open_regular(path) as file:
                data = file.read(2 * PAGE_BYTES)
        except OSError:
            return None
        process = _decoded(data[:PAGE_BYTES], ProcessState)
        if process is not None:
            lines = _decoded(data[PAGE_BYTES:], LinesState)
            if lines is not None and lines.attempt != process.attempt:
                lines = None
            return RankState(process=process, lines=lines)
        time.sleep(0.01)
    return None


def _decoded(data: bytes, kind: type[State]) -> State | None:
    try:
        return msgspec.json.decode(data.strip(), type=kind)
    except NOT_JSON:
        return None


def last_step(folder: Path, state: RankState) -> int | None:
    """The last global step with a line, in the attempt of the rank's state."""
    lines = state.lines
    if lines is not None and lines.closed_unix_ns is not None:
        return lines.last_step
    # Its process may have been killed since the state was written.
    try:
        last = msgspec.json.decode(last_line(folder / steps_name(state.rank)), type=_LastStep)
    except (OSError, *NOT_JSON):
        return None
    is_same_attempt = (last.run_id, last.attempt) == (state.process.run_id, state.process.attempt)
    return last.global_step if is_same_attempt else None


class _LastStep(msgspec.Struct):
    global_step: int
    run_id: str | None = None
    attempt: int = 0
