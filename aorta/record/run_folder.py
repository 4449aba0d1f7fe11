"""The folder of a run, as a training process sees it.

claim_folder moves an older run aside, or goes on with it after a restart; the ranks agree on that by rank 0's
announcement in the job's store. Standing writes the rank's state there, so that others see that it lives, and
how it ended.
"""

import fcntl
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from aorta.errors import NOT_JSON, RecordError
from aorta.processes import asking_thread, python_ends
from aorta.records.endings import attempt_ending
from aorta.records.files import (
    COLUMNS_FILES,
    RUN_FILES,
    STATE_FILES,
    STEPS_FILES,
    columns_name,
    state_name,
    steps_name,
    unwritten_name,
)
from aorta.records.launches import own_launches, read_notes
from aorta.records.reader import last_line, read_run
from aorta.records.run_identity import (
    RunLaunch,
    continues,
    derived_run_id,
    launch_of,
    may_continue,
    new_run_id,
    process_start,
)
from aorta.records.schema import AttemptRecord, Ending, PositionSource, RunRecord
from aorta.records.state import (
    HEARTBEAT_S,
    ProcessState,
    RankState,
    Save,
    StateFile,
    first_line,
    kept_saves,
    last_step,
    read_states,
    states_of,
)
from aorta.records.writer import CLOSING_S, LineWriter, move_aside, wait_until_closed
from aorta.steps.unwritten import unwritten_steps

PATIENCE = timedelta(minutes=5)
"""Limit of the wait for rank 0's announcement, should rank 0 or another rank come late."""
ASKING = timedelta(minutes=1)
"""Limit of rank 0's wait for the other ranks to ask, from its claim of the folder on."""
LEAVING_S = 1.0
"""Limit of the wait for a process that records into the folder and may be about to end, of one that can go to
a folder beside it."""
MOST_LAUNCHES = 8
"""Of earlier attempts, that a state names."""
WRITERS_S = 30.0
"""Limit of the wait for the process that writes the lines of a killed rank."""
Agents = Callable[[], set[str]]
"""Returns the agents that started the other ranks; asked only where it matters."""


@dataclass(frozen=True)
class Claim:
    """The right to write records into a folder."""

    run_id: str
    attempt: int
    launch: RunLaunch
    goes_on: bool
    """True: the rank's file of an earlier attempt is there and is continued."""
    earlier: list[AttemptRecord] = field(default_factory=list)
    """The attempts before this one, as rank 0 knows them."""
    next_step: int = 0
    """The number after the last step that the attempts before this one have recorded."""
    saves: list[Save] = field(default_factory=list)
    """What the attempts before this one have saved, by this rank and by rank 0."""
    launches: list[str] = field(default_factory=list)
    """Of the attempts before this one, as their ranks' states name them."""
    standing: "Standing | None" = None
    """Of a new run's rank 0, by which the folder is its own; the others have none yet."""


def claim_folder(output_dir: Path, rank: int, world_size: int) -> Claim:
    """Move an older run aside, or go on with it. Ranks of one run never move each other's files.

    With a process group rank 0 decides and the others wait for its word in the store (no collective), which
    may be its error. Without one, each rank looks after its own file, and rank 0 also after the files that no
    rank of this run will write.
    """
    launch = launch_of()
    if world_size == 1:
        return _claim_all(output_dir, launch)
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            try:
                claim = _claim_all(output_dir, launch, world_size, lambda: asking_agents(store, world_size))
            except RecordError as error:  # the others wait for a word, so they get the error
                announce(store, world_size, _encoded(_Word(error=str(error))))
                raise
            goes_on = bool(claim.earlier)
            word = _Word(claim.run_id, claim.attempt, goes_on, next_step=claim.next_step, saves=claim.saves)
            announce(store, world_size, _encoded(word))
            return claim
        word = msgspec.json.decode(announced(store, rank, launch.agent), type=_Word)
        return _claim_own(output_dir, rank, launch, word)
    return _claim_alone(output_dir, rank, world_size, launch)


class _Word(msgspec.Struct):
    """Rank 0's announcement to the others."""

    run_id: str = ""
    attempt: int = 0
    goes_on: bool = False
    error: str | None = None
    next_step: int = 0
    saves: list[Save] = []


def _encoded(word: _Word) -> str:
    return msgspec.json.encode(word).decode()


def _claim_all(folder: Path, launch: RunLaunch, world_size: int = 1, agents: Agents = set) -> Claim:
    """Claim the folder for all ranks, as rank 0."""
    _wait_until_left(folder, 0, world_size)
    _wait_for_writers(read_states(folder).values())
    run = _earlier_run(folder, launch, agents)
    if run is None:
        return _claim_anew(folder, launch, world_size)
    wait_until_closed(sorted(folder.glob(STEPS_FILES)))
    assert run.run_id is not None
    *earlier, last = run.attempts
    for rank in range(last.world_size):
        _write_unwritten(folder, rank, run.run_id, last.attempt)
    attempts = [
        *earlier,
        with_ending(folder, last, states_of(folder, run.run_id, last.attempt), is_over=True),
    ]
    saves, launches = _earlier(folder, 0, run.run_id)
    goes_on = _writes_of(folder / steps_name(0), run.run_id)
    if not goes_on:
        move_aside(folder, (steps_name(0), state_name(0)))
    return Claim(
        run.run_id,
        last.attempt + 1,
        launch,
        goes_on,
        earlier=attempts,
        next_step=_step_after(attempts),
        saves=saves,
        launches=launches,
    )


def _claim_anew(folder: Path, launch: RunLaunch, world_size: int) -> Claim:
    """As rank 0 of a new run. Of several that claim at once the first one's state tells the others."""
    while True:
        _wait_until_left(folder, 0, world_size)
        wait_until_closed(sorted(folder.glob(STEPS_FILES)))  # not within the lock, for which others wait
        with _locked(folder):
            if not _is_taken(folder, 0):
                move_aside(folder)
                claim = Claim(new_run_id(launch), 0, launch, goes_on=False)
                return replace(claim, standing=Standing(folder, claim, 0, world_size))


def _earlier(folder: Path, rank: int, run_id: str) -> tuple[list[Save], list[str]]:
    """What a rank's state tells of the attempts of this run before: its saves and its launches."""
    state = read_states(folder).get(rank)
    if state is None or state.process.run_id != run_id:
        return [], []
    return state.process.saves, state.process.launches[-MOST_LAUNCHES:]


def _step_after(attempts: Iterable[AttemptRecord]) -> int:
    """The number after the last step that any rank has recorded."""
    steps = [step for attempt in attempts for step in attempt.last_steps if step is not None]
    return max(steps, default=-1) + 1


def _earlier_run(folder: Path, launch: RunLaunch, agents: Agents) -> RunRecord | None:
    """Return the run in the folder if these processes go on with it; else None."""
    try:
        run = read_run(folder)
        earlier = msgspec.convert(run.launch, RunLaunch)
    except (RecordError, msgspec.ValidationError):
        return None
    if run.run_id is None or not run.attempts:
        return None
    # Where the number of agents changed, rank 0 may be on one that is new and has counted no restart.
    is_same = launch.run_id == run.run_id or continues(launch, earlier)
    if not is_same and not (may_continue(launch, earlier) and earlier.agent in agents()):
        return None
    states = states_of(folder, run.run_id, run.attempts[-1].attempt)
    if any(state.process.pid == os.getpid() for state in states):
        return None  # this process has started another run after it
    if launch.run_id is None:
        ending = attempt_ending(states, run.attempts[-1].world_size, True, read_notes(folder))
        if ending is not None and ending.kind == "finished":
            return None
    return run


def _wait_for_writers(states: Iterable[RankState]) -> None:
    """Wait until the processes of this machine that write lines for dead ranks have ended.

    An open file would not tell: a writer whose rank was killed early may not have opened it yet, and its
    lines are still to come. Raises RecordError after WRITERS_S.
    """
    end_s = time.monotonic() + WRITERS_S
    for state in states:
        while state.has_writer and not state.is_alive:
            if time.monotonic() > end_s:
                raise RecordError(
                    f"process {state.process.writer_pid} is still writing the lines of rank {state.rank}:"
                    " end it, or choose another output_dir"
                )
            time.sleep(0.02)


def _wait_until_left(folder: Path, rank: int, world_size: int) -> None:
    """Wait until no other process of this machine records as this rank, or is about to: before its first step
    it has no file open. RecordError where it stays; of several ranks, which have no other folder, later."""
    end_s = time.monotonic() + (LEAVING_S if world_size == 1 else CLOSING_S)
    while _is_taken(folder, rank):
        if time.monotonic() > end_s:
            raise _still_writing(folder / steps_name(rank))
        time.sleep(0.05)


def _still_writing(path: Path) -> RecordError:
    return RecordError(f"a run is still writing {path}: end it, or choose another output_dir")


def _is_taken(folder: Path, rank: int) -> bool:
    state = read_states(folder).get(rank)
    own = (os.getpid(), os.getppid())  # a parent waits for the ranks that it has started
    if state is None or state.process.ending is not None or state.process.pid in own:
        return False
    return state.process.host == socket.gethostname() and state.is_alive is True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time; RecordError where another stays. Without, where the file system has no locks."""
    descriptor, end_s = None, time.monotonic() + CLOSING_S
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            while not _takes_lock(descriptor):
                if time.monotonic() > end_s:
                    raise _still_writing(folder)
                time.sleep(0.01)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _takes_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_unwritten(folder: Path, rank: int, run_id: str, attempt: int) -> None:
    """Write the steps that a killed process had closed and not written."""
    unwritten, path = folder / unwritten_name(rank), folder / steps_name(rank)
    if not unwritten.exists() or not path.exists():
        return
    with suppress(OSError, RecordError, *NOT_JSON):
        line = last_line(path)
        last = msgspec.json.decode(line, type=_LineOfRun) if line else None
        if last is not None and last.run_id != run_id:
            return
        is_this_attempt = last is not None and (last.run_id, last.attempt) == (run_id, attempt)
        last_written = (last.rollbacks, last.global_step) if last is not None and is_this_attempt else None
        with LineWriter.append(path) as writer:
            for record in unwritten_steps(unwritten, (run_id, attempt), last_written):
                writer.write(record)
        unwritten.unlink()


def _claim_own(folder: Path, rank: int, launch: RunLaunch, word: _Word) -> Claim:
    """Claim this rank's file by rank 0's word.

    Where the folder is not rank 0's (another node, a path of its own), files of other ranks remain.
    """
    if word.error is not None:
        raise RecordError(word.error)
    path = folder / steps_name(rank)
    _wait_for_writers(state for state in read_states(folder).values() if state.rank == rank)
    saves, launches = _earlier(folder, rank, word.run_id)
    saves = [*word.saves, *saves]
    goes_on = word.goes_on and _writes_of(path, word.run_id)
    if goes_on:
        wait_until_closed([path])
    else:
        move_aside(folder, (steps_name(rank), state_name(rank)))
    number = word.next_step
    return Claim(word.run_id, word.attempt, launch, goes_on, next_step=number, saves=saves, launches=launches)


def _claim_alone(folder: Path, rank: int, world_size: int, launch: RunLaunch) -> Claim:
    """Claim this rank's file without a process group, by what the launcher's variables say alone."""
    run_id, path = derived_run_id(launch), folder / steps_name(rank)
    attempt = launch.num_restarts + launch.num_requeues
    _wait_until_left(folder, rank, world_size)
    _wait_for_writers(state for state in read_states(folder).values() if state.rank == rank)
    if attempt and _writes_of(path, run_id):
        wait_until_closed([path])
        saves, launches = _earlier(folder, rank, run_id)
        number = _last_number(path) + 1
        return Claim(run_id, attempt, launch, goes_on=True, next_step=number, saves=saves, launches=launches)
    names = {STEPS_FILES: steps_name, STATE_FILES: state_name, COLUMNS_FILES: columns_name}
    patterns = [name(rank) for name in names.values()]
    if rank == 0:
        patterns += [pattern for pattern in RUN_FILES if pattern not in names]
        for pattern, name in names.items():
            rank_names = {name(peer) for peer in range(world_size)}
            patterns += [path.name for path in folder.glob(pattern) if path.name not in rank_names]
    move_aside(folder, tuple(patterns))
    return Claim(run_id, attempt, launch, goes_on=False)


class _LineOfRun(msgspec.Struct):
    """The part of a line that tells which run and step it belongs to."""

    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    global_step: int = 0


def _last_number(path: Path) -> int:
    """The global step of the file's last line; -1 where it has none."""
    try:
        line = last_line(path)
        return msgspec.json.decode(line, type=_LineOfRun).global_step if line else -1
    except (OSError, *NOT_JSON):
        return -1


def _writes_of(path: Path, run_id: str) -> bool:
    """True if the file holds lines of this run, or none yet: its process was killed before the first."""
    try:
        line = last_line(path)
        return not line or msgspec.json.decode(line, type=_LineOfRun).run_id == run_id
    except (OSError, *NOT_JSON):
        return False


def with_ending(
    folder: Path, attempt: AttemptRecord, states: list[RankState], is_over: bool
) -> AttemptRecord:
    """Return the attempt with its end as the ranks' states say. is_over: its processes are dead for sure."""
    steps: list[int | None] = [None] * attempt.world_size
    for state in states:
        if state.rank < len(steps):
            steps[state.rank] = last_step(folder, state)
    first_steps = [state.process.first_step for state in sorted(states, key=lambda state: state.rank)]
    ending = attempt_ending(states, attempt.world_size, is_over, read_notes(folder))
    if ending is None and is_over:
        ending = Ending(kind="killed", why="no rank left a word")
    return msgspec.structs.replace(
        attempt,
        ending=ending,
        first_step=next((step for step in first_steps if step is not None), attempt.first_step),
        last_steps=steps,
        position_by=next((state.process.position_by for state in states if state.rank == 0), None),
    )


def announce(store: Store, world_size: int, word: str) -> None:
    """Tell the other ranks rank 0's word, each once it asks. Returns at once: a thread answers."""
    own = _own_connection(store)
    asking_thread(lambda: _answer(own, world_size, word), "aorta-announce")


def announced(store: Store, rank: int, agent: str | None = None) -> str:
    """Wait for what rank 0 of this very attempt announces. Raises torch's DistStoreError where none comes.

    agent: the launcher's agent that started this rank, for rank 0 to know.
    """
    store = PrefixStore("aorta/announced", store)
    name = secrets.token_hex(8)  # the store outlives a restart: an answer to an earlier attempt must not fit
    store.set(f"asks/{rank}", f"{name}\n{agent or ''}")
    store.wait([f"told/{name}"], PATIENCE)
    lot, _, word = store.get(f"told/{name}").decode().partition("\n")
    store.set(f"heard/{lot}/{rank}", "")
    return word


def asking_agents(store: Store, world_size: int) -> set[str]:
    """Return the agents of the other ranks, as they come to ask.

    Those of an earlier attempt that left its keys in the store count too: the same store is the same job.
    """
    keys = [f"asks/{rank}" for rank in range(1, world_size)]
    store = PrefixStore("aorta/announced", _own_connection(store))
    with suppress(RuntimeError):  # some do not come
        store.wait(keys, ASKING)
        return {store.get(key).decode().partition("\n")[2] for key in keys} - {""}
    return set()


def _answer(store: Store, world_size: int, word: str) -> None:
    """Answer each rank that asks, again if it restarts, until every one has heard."""
    lot = secrets.token_hex(8)
    word_sent: dict[int, str] = {}
    missing = set(range(1, world_size))
    end_s = time.monotonic() + 2 * PATIENCE.total_seconds()
    wait_s = 0.005
    with suppress(RuntimeError):  # the store is gone, and with it the job
        store = PrefixStore("aorta/announced", store)
        while missing and time.monotonic() < end_s and not python_ends.is_set():
            for rank in sorted(missing):
                if store.check([f"heard/{lot}/{rank}"]):
                    missing.remove(rank)
                elif store.check([f"asks/{rank}"]):
                    name = store.get(f"asks/{rank}").decode().partition("\n")[0]
                    if word_sent.get(rank) != name:
                        word_sent[rank] = name
                        store.set(f"told/{name}", f"{lot}\n{word}")
            if missing:
                python_ends.wait(wait_s)
                wait_s = min(0.2, wait_s * 1.3)


def _own_connection(store: Store) -> Store:
    """Open another connection: one answers one question at a time, and a thread may wait in it."""
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        return store.clone()  # type: ignore[attr-defined,no-any-return]
    return store


class Standing:
    """Writes the state of one rank in one attempt: at the start, every HEARTBEAT_S, and at the end."""

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
            launches=[*dict.fromkeys((*claim.launches, *own_launches()))],
        )
        self._written_s = time.monotonic()
        self._first_step: int | None = None
        self._begun_step: int | None = None
        self._position_by: PositionSource | None = None if claim.attempt else "program"
        self._saves = kept_saves(claim.saves) if claim.saves else []
        self._ending: Ending | None = None
        self._file.write(self._state)

    def written_by(self, pid: int) -> None:
        """Note the process that writes the rank's lines."""
        self._state = msgspec.structs.replace(self._state, writer_pid=pid, writer_start=process_start(pid))
        self._write()

    def begin(self, global_step: int) -> None:
        """Note that the rank begins this step."""
        self._begun_step = global_step
        if self._first_step is None:
            self._first_step = global_step
            self._write()

    def program_numbers(self) -> None:
        """Note that the program gives the number of the step that comes."""
        if self._first_step is None:
            self._position_by = "program"

    def saved(self, save: Save) -> None:
        """Note a checkpoint, for an attempt that goes on from there."""
        self._saves = kept_saves([*self._saves, save])
        self._write()

    def continue_at(self, first_step: int, told_by: PositionSource | None) -> None:
        """Note the number of the first step, and who told it; None: it was counted on."""
        self._first_step, self._position_by = first_step, told_by
        self._write()

    def beat(self) -> None:
        """Write that the rank lives, if it is time to."""
        if time.monotonic() - self._written_s >= HEARTBEAT_S:
            self._write()

    def end(self, ending: Ending) -> None:
        """Write how the rank ended; of two, the one that is no good end."""
        if self._ending is None or self._ending.kind == "finished" != ending.kind:
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
                position_by=self._position_by,
                saves=self._saves,
                ending=self._ending,
            )
        )


def ending_of(error: BaseException | None) -> Ending:
    """Return what leaving the training code by this exception, or None, means for the run."""
    now_ns = time.time_ns()
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Ending(kind="finished", unix_ns=now_ns)
    if isinstance(error, KeyboardInterrupt):
        return Ending(kind="stopped", why=signal.Signals.SIGINT.name, unix_ns=now_ns)
    return Ending(kind="crashed", why=first_line(error), unix_ns=now_ns)
