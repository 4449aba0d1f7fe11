"""The folder of a run, from the side of a training process: room is made for it, ranks agree on it, the rank's state stands in it."""

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from aorta.errors import NOT_JSON, RecordError
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
from aorta.records.schema import AttemptRecord, Ending, RunRecord
from aorta.records.state import (
    HEARTBEAT_S,
    ProcessState,
    RankState,
    StateFile,
    attempt_ending,
    first_line,
    last_step,
    read_states,
)
from aorta.records.writer import LineWriter, move_aside, wait_until_closed
from aorta.steps.process import unwritten_steps

PATIENCE = timedelta(minutes=5)
"""With a rank 0 that comes late, or ranks that do."""
ASKING = timedelta(minutes=1)
"""From rank 0's claim of the folder to the others' questions."""


def announce(store: Store, world_size: int, word: str) -> None:
    """Rank 0 tells the others, each once it asks. Returns at once: a thread answers."""
    thread = threading.Thread(
        target=_answer, args=(own_connection(store), world_size, word), name="aorta-announce", daemon=True
    )
    thread.start()


def announced(store: Store, rank: int, agent: str | None = None) -> str:
    """What rank 0 of this very attempt announces. torch's DistStoreError where it does not come.

    agent: what started this rank, for rank 0 to know.
    """
    store = PrefixStore("aorta/announced", store)
    name = secrets.token_hex(8)
    store.set(f"asks/{rank}", f"{name}\n{agent or ''}")
    store.wait([f"told/{name}"], PATIENCE)
    lot, _, word = store.get(f"told/{name}").decode().partition("\n")
    store.set(f"heard/{lot}/{rank}", "")
    return word


def asking_agents(store: Store, world_size: int) -> set[str]:
    """Of the other ranks, as they come to ask. Those of an earlier attempt that left its keys in the store
    count too: whoever has the same store is of the same job."""
    keys = [f"asks/{rank}" for rank in range(1, world_size)]
    store = PrefixStore("aorta/announced", own_connection(store))
    with suppress(RuntimeError):  # some do not come
        store.wait(keys, ASKING)
        return {store.get(key).decode().partition("\n")[2] for key in keys} - {""}
    return set()


def own_connection(store: Store) -> Store:
    """One connection answers one question at a time, and another thread may wait in it."""
    with suppress(RuntimeError, NotImplementedError, AttributeError):
        return store.clone()  # type: ignore[attr-defined,no-any-return]
    return store


def _answer(store: Store, world_size: int, word: str) -> None:
    lot = secrets.token_hex(8)
    word_sent: dict[int, str] = {}
    missing = set(range(1, world_size))
    end_s = time.monotonic() + 2 * PATIENCE.total_seconds()
    wait_s = 0.005
    with suppress(RuntimeError):  # the store is gone, and with it the job
        store = PrefixStore("aorta/announced", store)
        while missing and time.monotonic() < end_s:
            for rank in sorted(missing):
                if store.check([f"heard/{lot}/{rank}"]):
                    missing.remove(rank)
                elif store.check([f"asks/{rank}"]):
                    name = store.get(f"asks/{rank}").decode().partition("\n")[0]
                    if word_sent.get(rank) != name:
                        word_sent[rank] = name
                        store.set(f"told/{name}", f"{lot}\n{word}")
            if missing:
                time.sleep(wait_s)
                wait_s = min(0.2, wait_s * 1.3)


WRITERS_S = 30.0
"""How long the lines of a killed rank may take to be written."""


@dataclass(frozen=True)
class Claim:
    """The right to write records into a folder."""

    run_id: str
    attempt: int
    launch: RunLaunch
    goes_on: bool
    """The rank's file of an earlier attempt is there, to be gone on with."""
    earlier: list[AttemptRecord] = field(default_factory=list)
    """The attempts before this one, as rank 0 knows them."""


class _Word(msgspec.Struct):
    """What rank 0 tells the others."""

    run_id: str = ""
    attempt: int = 0
    goes_on: bool = False
    error: str | None = None


def claim_folder(output_dir: Path, rank: int, world_size: int) -> Claim:
    """Move what another run left aside. Ranks of one run never move each other's files.

    With a process group rank 0 decides and the others wait for its word in the store (no collective), which
    may be its error. Without one, each rank looks after its own file, and rank 0 after what no rank of this
    run will write.
    """
    launch = launch_of()
    if world_size == 1:
        return _claim_all(output_dir, launch)
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            try:
                claim = _claim_all(output_dir, launch, lambda: asking_agents(store, world_size))
            except RecordError as error:
                announce(store, world_size, _encoded(_Word(error=str(error))))
                raise
            word = _Word(run_id=claim.run_id, attempt=claim.attempt, goes_on=bool(claim.earlier))
            announce(store, world_size, _encoded(word))
            return claim
        word = msgspec.json.decode(announced(store, rank, launch.agent), type=_Word)
        return _claim_own(output_dir, rank, launch, word)
    return _claim_alone(output_dir, rank, world_size, launch)


def _encoded(word: _Word) -> str:
    return msgspec.json.encode(word).decode()


Agents = Callable[[], set[str]]
"""What started the other ranks."""


def _claim_all(folder: Path, launch: RunLaunch, agents: Agents = set) -> Claim:
    wait_for_writers(read_states(folder).values())
    run = _earlier_run(folder, launch, agents)
    if run is None:
        move_aside(folder)
        return Claim(new_run_id(launch), 0, launch, goes_on=False)
    wait_until_closed(sorted(folder.glob(STEPS_FILES)))
    assert run.run_id is not None
    *earlier, last = run.attempts
    for rank in range(last.world_size):
        _write_unwritten(folder, rank, run.run_id, last.attempt)
    attempts = [
        *earlier,
        with_ending(folder, last, states_of(folder, run.run_id, last.attempt), is_over=True),
    ]
    goes_on = _writes_of(folder / steps_name(0), run.run_id)
    if not goes_on:
        move_aside(folder, (steps_name(0), state_name(0)))
    return Claim(run.run_id, last.attempt + 1, launch, goes_on, attempts)


def wait_for_writers(states: Iterable[RankState]) -> None:
    """Returns once the processes of this machine that write lines for ranks that are gone have ended.

    One that has only just been started when its rank is killed has not opened the file yet: the file looks
    closed, and the lines are still to come. RecordError after WRITERS_S.
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


def _earlier_run(folder: Path, launch: RunLaunch, agents: Agents) -> RunRecord | None:
    """The run in the folder, if these processes go on with it."""
    try:
        run = read_run(folder)
        earlier = msgspec.convert(run.launch, RunLaunch)
    except (RecordError, msgspec.ValidationError):
        return None
    if run.run_id is None or not run.attempts:
        return None
    # Where the number of agents changed, rank 0 may be on one that is new and has counted no restart.
    if not continues(launch, earlier) and not (may_continue(launch, earlier) and earlier.agent in agents()):
        return None
    states = states_of(folder, run.run_id, run.attempts[-1].attempt)
    if any(state.process.pid == os.getpid() for state in states):
        return None  # this process has started another run after it
    if launch.run_id is None:
        ending = attempt_ending(states, run.attempts[-1].world_size, is_over=True)
        if ending is not None and ending.kind == "finished":
            return None
    return run


def states_of(folder: Path, run_id: str, attempt: int) -> list[RankState]:
    return [
        state
        for state in read_states(folder).values()
        if (state.process.run_id, state.process.attempt) == (run_id, attempt)
    ]


def with_ending(
    folder: Path, attempt: AttemptRecord, states: list[RankState], is_over: bool
) -> AttemptRecord:
    """The attempt with what its ranks' states say of its end. is_over: its processes cannot live any more."""
    steps: list[int | None] = [None] * attempt.world_size
    for state in states:
        if state.rank < len(steps):
            steps[state.rank] = last_step(folder, state)
    first = [state.process.first_step for state in sorted(states, key=lambda state: state.rank)]
    ending = attempt_ending(states, attempt.world_size, is_over)
    if ending is None and is_over:
        ending = Ending(kind="killed", why="no rank left a word")
    return msgspec.structs.replace(
        attempt,
        ending=ending,
        first_step=next((step for step in first if step is not None), attempt.first_step),
        last_steps=steps,
    )


def _claim_own(folder: Path, rank: int, launch: RunLaunch, word: _Word) -> Claim:
    """Where the folder is not rank 0's (another node, a path of its own), old files remain."""
    if word.error is not None:
        raise RecordError(word.error)
    path = folder / steps_name(rank)
    wait_for_writers(state for state in read_states(folder).values() if state.rank == rank)
    goes_on = word.goes_on and _writes_of(path, word.run_id)
    if goes_on:
        wait_until_closed([path])
    else:
        move_aside(folder, (steps_name(rank), state_name(rank)))
    return Claim(word.run_id, word.attempt, launch, goes_on)


def _claim_alone(folder: Path, rank: int, world_size: int, launch: RunLaunch) -> Claim:
    run_id, path = derived_run_id(launch), folder / steps_name(rank)
    attempt = launch.num_restarts + launch.num_requeues
    wait_for_writers(state for state in read_states(folder).values() if state.rank == rank)
    if attempt and _writes_of(path, run_id):
        wait_until_closed([path])
        return Claim(run_id, attempt, launch, goes_on=True)
    names = {STEPS_FILES: steps_name, STATE_FILES: state_name, COLUMNS_FILES: columns_name}
    patterns = [name(rank) for name in names.values()]
    if rank == 0:
        patterns += [pattern for pattern in RUN_FILES if pattern not in names]
        for pattern, name in names.items():
            rank_names = {name(peer) for peer in range(world_size)}
            patterns += [path.name for path in folder.glob(pattern) if path.name not in rank_names]
    move_aside(folder, tuple(patterns))
    return Claim(run_id, attempt, launch, goes_on=False)


class _OfRun(msgspec.Struct):
    run_id: str | None = None
    attempt: int = 0
    rollbacks: int = 0
    global_step: int = 0


def _write_unwritten(folder: Path, rank: int, run_id: str, attempt: int) -> None:
    """What a killed process had closed and not written."""
    unwritten, path = folder / unwritten_name(rank), folder / steps_name(rank)
    if not unwritten.exists() or not path.exists():
        return
    with suppress(OSError, RecordError, *NOT_JSON):
        line = last_line(path)
        last = msgspec.json.decode(line, type=_OfRun) if line else None
        if last is not None and last.run_id != run_id:
            return
        is_this_attempt = last is not None and (last.run_id, last.attempt) == (run_id, attempt)
        last_written = (last.rollbacks, last.global_step) if last is not None and is_this_attempt else None
        with LineWriter.append(path) as writer:
            for record in unwritten_steps(unwritten, (run_id, attempt), last_written):
                writer.write(record)
        unwritten.unlink()


def _writes_of(path: Path, run_id: str) -> bool:
    """Whether the file holds lines of this run, or none yet: its process was killed before the first."""
    try:
        line = last_line(path)
        return not line or msgspec.json.decode(line, type=_OfRun).run_id == run_id
    except (OSError, *NOT_JSON):
        return False


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
