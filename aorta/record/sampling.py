"""Chooses the steps that are recorded, while the program runs: the same on all ranks, within the overhead.

Rank 0 measures and decides (overhead.py), and tells the others through the job's store well before a change;
nobody waits for anybody. A rank that learns of a change late goes on as before: its recorded steps are among
those of the others, or the other way round.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from aorta.files import read_regular, write_whole
from aorta.processes import asking_thread
from aorta.record.overhead import (
    BLOCK,
    CHANGED,
    FIRST_EVERY,
    NUM_FIRST,
    NUM_FIRST_LEFT_OUT,
    SLOW,
    Meter,
    Pair,
    block_of,
    has_details,
    is_recorded,
    is_seen,
)
from aorta.records.files import overhead_name
from aorta.records.schema import OverheadRecord

logger = logging.getLogger(__name__)

AHEAD_S = 4.0
"""How long before a change the others can learn of it."""
ASK_EVERY_S = 1.0
"""Interval at which a rank asks for a change that is due."""
LONGEST_S = 300.0
"""Longest time between two decisions. The first one is made as soon as there is a cost; each later one after
twice the time of the one before."""
KNOWN_FROM = 4
"""Block from which on the usual length of a step is known, where none was recorded since the first ones."""
MANY_LEFT_OUT = 16
"""Left-out steps after which CPU time of the recorder's own threads is read."""
MOST_BLOCKS = 64
LOOK_AFTER_NS = 500_000_000
"""Blocks, and time, after which a decision is looked for in steps that go on."""
NO_STORE_S = 30.0
"""Time after which a rank without a process group decides for itself."""
KEY = "overhead/{}"


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def check(self, keys: list[str], /) -> bool: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...


class Plan(msgspec.Struct, frozen=True):
    """A decision: from a block on, one block of `every` is recorded."""

    number: int
    block: int
    every: int
    look_at: int
    """Block from which on the next decision may be made."""


class Sampling:
    """Says of each step whether it is recorded. With limit None every one is."""

    def __init__(
        self,
        limit: float | None,
        clock: Callable[[], int] = time.monotonic_ns,
        cpu_clock: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self.limit = limit
        self._clock, self._cpu_clock = clock, cpu_clock
        self.meter = Meter()
        self._rank, self._world_size = 0, 1
        self._store: Callable[[], Store | None] = lambda: None
        self._state: Path | None = None
        self._first: int | None = None
        """Global step of the first step of this process."""
        self._plan = Plan(0, 0, FIRST_EVERY, 0)
        self._next: Plan | None = None
        self._extra = range(0)
        """Blocks recorded out of turn: one after a slow step, two after steps have changed, which ranks
        notice at places that differ a little."""
        self._plain_ms = self._known_ms = 0.0
        """The usual length of a step that is left out: now, and before the last one that was recorded."""
        self._decide_after_s = AHEAD_S
        self._decided_ns = 0
        self._began_ns = self._began_cpu_ns = 0
        self._place = -1
        self._was_recorded = self._was_switched = False
        self._own_ns = 0
        self._usual_ms = 0.0
        self._plain: list[float] = []
        """Lengths of the steps that went on since the last one that was begun in full."""
        self._plain_own_ns = 0
        self._goes_until = -1
        """Place up to which steps are left out, and nothing is to be decided before _goes_until_ns."""
        self._goes_until_ns = 0
        self._slow_ns = 0.0
        self.own_threads_ns: Callable[[], int] = lambda: 0
        """Returns the CPU time of the recorder's own threads so far."""
        self._threads_ns: int | None = None
        """That at the begin of the steps that are left out, while they last, or since it was read last."""
        self._threads_until = 0
        """Place of the step at which it is read again."""
        self.was_slow = False
        """True: the step before the one that has begun took several usual lengths."""
        self._talk: _Talk | None = None

    def open(self, rank: int, world_size: int, store: Callable[[], Store | None], state: Path | None) -> None:
        """Begin a run. store: returns the ranks' common store once there is one. state: rank 0's file, by
        which a restart goes on with what was measured."""
        self._rank, self._world_size, self._store, self._state = rank, world_size, store, state
        if state is not None and rank == 0:
            self.meter.continue_with(_read_state(state))

    # -- steps (on the thread that trains) -------------------------------------------------------------

    def begin(self, global_step: int) -> bool:
        """Return True where the step that begins is recorded. Also ends the measurement of the one before."""
        self._settle()
        if self._first is None:
            self._first = global_step
        place = global_step - self._first
        now_ns = self._clock()
        follows = self._began_ns > 0 and place == self._place + 1
        self.was_slow = follows and self._judge_length((now_ns - self._began_ns) / 1e6)
        if self.limit is None:
            self._began_ns, self._place = now_ns, place
            self.meter.num_steps += 1
            self.meter.num_recorded += 1
            return True
        cpu_ns = self._cpu_clock()
        if self._began_ns:
            self._ended(now_ns, cpu_ns, follows)
        if place >= NUM_FIRST:
            self._look_for_plan(place, now_ns)
        recorded = self._is_planned(place)
        self._began_ns, self._began_cpu_ns, self._place, self._own_ns = now_ns, cpu_ns, place, 0
        if (recorded and not self._was_recorded) or (block_of(place) >= KNOWN_FROM and not self._known_ms):
            self._known_ms = self._plain_ms
        self._was_switched = self._was_recorded and not recorded
        self._was_recorded = recorded
        self._count_threads(recorded)
        if not recorded:
            self._look_ahead(place, now_ns)
        return recorded

    def goes_on(self, now_ns: int) -> bool:
        """Take the open step as ended and the next as left out, too, where nothing else can be: cheaply.

        Returns False, with nothing done, where `begin` has more to do. The open step is left out.
        """
        length_ns = now_ns - self._began_ns
        if self._place >= self._goes_until or now_ns >= self._goes_until_ns:
            return False
        if length_ns > self._slow_ns and self.meter.has_room(self.limit or 0.0, sum(self._plain)):
            return False  # the block after a slow step may be recorded
        self._plain.append(length_ns / 1e6)
        self._began_ns = now_ns
        self._place += 1
        self._plain_own_ns += self._own_ns
        self._own_ns = 0
        return True

    def _look_ahead(self, place: int, now_ns: int) -> None:
        """See how far steps go on from this one, which is left out.

        The last one before a recorded block is begun in full: the driver's records are turned on in it.
        """
        self._goes_until = -1
        if self._was_switched or not self._began_ns or block_of(place) < NUM_FIRST_LEFT_OUT:
            return  # the first ones make the first cost: each with the process's CPU time of its own
        self._slow_ns = SLOW * self._usual_ms * 1e6
        block = block_of(place)
        changes = [self._plan.look_at] if self._next is None else [self._next.block]
        ends = min([block + MOST_BLOCKS, *(change for change in changes if change > block)])
        while block < ends and not self._is_planned(NUM_FIRST + block * BLOCK):
            block += 1
        self._goes_until = NUM_FIRST + block * BLOCK - 2
        self._goes_until_ns = now_ns + LOOK_AFTER_NS

    def _count_threads(self, recorded: bool) -> None:
        """Count what the recorder's own threads took while steps were left out: reading it takes 35 us."""
        if not recorded and self._threads_ns is not None and self._place < self._threads_until:
            return
        self._threads_until = self._place + MANY_LEFT_OUT
        before_ns, self._threads_ns = self._threads_ns, None
        if before_ns is None and recorded:
            return
        now_ns = self.own_threads_ns()
        if before_ns is not None:
            self.meter.threads_took(max(now_ns - before_ns, 0) / 1e6)
        if not recorded:
            self._threads_ns = now_ns

    def _settle(self) -> None:
        """Have the meter take the steps that went on."""
        if not self._plain:
            return
        for step_ms in self._plain:
            self._usual_ms = _moved(self._usual_ms, step_ms)
            self._plain_ms = _moved(self._plain_ms, step_ms)
        # The process's clock takes as long to read as all of goes_on: read when the first of them began.
        cpu_ns = self._cpu_clock()
        cpu_ms = (cpu_ns - self._began_cpu_ns) / 1e6
        self.meter.add_plain(self._plain, cpu_ms / len(self._plain), self._plain_own_ns / 1e6)
        self._plain, self._plain_own_ns, self._began_cpu_ns = [], 0, cpu_ns

    def renumbered(self, delta: int) -> None:
        """Note that the open step, the first one, has got a number that is larger by delta."""
        if self._first is not None:
            self._first += delta

    def comes_next(self) -> bool:
        """True if the step after the one that has begun is recorded, as far as is known."""
        place = self._place + 1
        return self.limit is None or self._is_planned(place)

    def is_seen(self) -> bool:
        """True if collectives are noted one by one in the step that has begun, also where they are known."""
        return is_seen(self._place)

    def has_details(self) -> bool:
        """True if the line of the step that has begun has details."""
        return has_details(self._place)

    def _is_planned(self, place: int) -> bool:
        return is_recorded(place, self._plan.every) or (place >= NUM_FIRST and block_of(place) in self._extra)

    def switched(self) -> None:
        """Note that something was put on or taken off in the open step, which is not recorded."""
        self._was_switched, self._goes_until = True, -1

    def took(self, own_ns: int) -> None:
        """Note time that our own code took at an end of the open step."""
        self._own_ns += own_ns

    def interrupted(self) -> None:
        """Note that what follows is no step, or that the open one holds something rare: a checkpoint."""
        self._settle()
        self._count_threads(recorded=True)
        self._began_ns, self._goes_until = 0, -1
        self.meter.interrupted()

    def _ended(self, now_ns: int, cpu_ns: int, follows: bool) -> None:
        step_ms = (now_ns - self._began_ns) / 1e6
        if not follows:
            self.meter.interrupted()
            return
        self.meter.add(
            step_ms,
            self._place,
            self._was_recorded,
            self._was_switched,
            self._own_ns / 1e6,
            (cpu_ns - self._began_cpu_ns) / 1e6,
        )
        if not self._was_recorded and not self._was_switched:
            self._plain_ms = _moved(self._plain_ms, step_ms)
        block = block_of(self._place)
        num_extra = 2 if self._has_changed() else 1 if self.was_slow else 0
        is_free = block + 1 >= self._extra.stop  # no block out of turn is under way or to come but this one
        if num_extra and is_free and self.meter.has_room(self.limit or 0.0, num_blocks=num_extra):
            self._extra = range(block + 1, block + 1 + num_extra)

    def _has_changed(self) -> bool:
        """True where steps are longer or shorter than when some were recorded: a rank may be late since."""
        return self._known_ms > 0 and not 1 / CHANGED < self._plain_ms / self._known_ms < CHANGED

    def _judge_length(self, step_ms: float) -> bool:
        """Note the length of the step that has just ended; True where it was slow."""
        usual_ms = self._usual_ms
        if self._place < NUM_FIRST:
            self._usual_ms = step_ms if usual_ms == 0 else min(usual_ms * 1.05, step_ms)
            return False
        self._usual_ms = _moved(usual_ms, step_ms)
        return 0 < SLOW * usual_ms < step_ms

    # -- decisions -------------------------------------------------------------------------------------

    def _look_for_plan(self, place: int, now_ns: int) -> None:
        block = block_of(place)
        if self._next is None and self._talk is not None:
            self._next = self._talk.heard(self._plan.number + 1)
        if self._next is not None and block >= self._next.block:
            self._plan, self._next = self._next, None
            self._decided_ns = now_ns
        if self._next is not None or block < max(self._plan.look_at, 2):
            return
        alone = self._world_size == 1 or (self._talk is not None and self._talk.is_alone)
        if self._talk is None and self._world_size > 1:
            self._talk = _Talk(self._store)
        if self._rank == 0 or alone:
            self._decide(block, now_ns, alone)
        elif self._talk is not None:
            self._talk.ask(self._plan.number + 1)

    def _decide(self, block: int, now_ns: int, alone: bool) -> None:
        if (now_ns - self._decided_ns) / 1e9 < (self._decide_after_s if self._plan.number else 0.0):
            return
        self.meter.settle()
        if self.meter.cost() is None:
            return
        assert self.limit is not None
        every = self.meter.chosen_every(self.limit)
        block_s = BLOCK * max(self.meter.plain_ms or self._usual_ms, 1e-3) / 1e3
        ahead = 1 if alone else 1 + int(AHEAD_S / block_s)
        look_at = block + ahead + 1 + int(self._decide_after_s / block_s)
        self._next = Plan(self._plan.number + 1, block + ahead, every, look_at)
        self._decide_after_s = min(2 * self._decide_after_s, LONGEST_S)
        if self._talk is not None and not alone:
            self._talk.tell(self._next)
        if self._state is not None and self._rank == 0:
            _write_state(self._state, self.meter)

    def close(self) -> None:
        if self._talk is not None:
            self._talk.close()
        self._settle()
        self.meter.settle()
        if self._state is not None and self._rank == 0 and self.meter.pairs():
            _write_state(self._state, self.meter)

    def record(self) -> OverheadRecord:
        """Describe what recording has cost, for run.json."""
        self._settle()
        return self.meter.record(self.limit)


def _moved(usual_ms: float, step_ms: float) -> float:
    """A running middle: it moves by a share of itself, however long one step was."""
    return step_ms if usual_ms == 0 else usual_ms * (1.02 if step_ms > usual_ms else 1 / 1.02)


class _Talk:
    """Asks and tells on a thread of its own: a store whose machine is gone may not answer for minutes."""

    def __init__(self, store: Callable[[], Store | None]) -> None:
        self._find_store = store
        self._store: Store | None = None
        self._awake = threading.Event()
        self._closed = False
        self._wanted: int | None = None
        self._heard: Plan | None = None
        self._to_tell: list[Plan] = []
        self.is_alone = False
        """True: there is no process group, so each rank decides for itself."""
        self._thread = asking_thread(self._run, "aorta-overhead")

    def ask(self, number: int) -> None:
        if self._wanted != number:
            self._wanted = number
            self._awake.set()

    def heard(self, number: int) -> Plan | None:
        """Return the plan of this number, if it has been told."""
        plan = self._heard
        return plan if plan is not None and plan.number == number else None

    def tell(self, plan: Plan) -> None:
        self._to_tell.append(plan)
        self._awake.set()

    def close(self) -> None:
        self._closed = True
        self._awake.set()

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            while not self._closed:
                if self._store is None:
                    self._store = self._found()
                    self.is_alone = self._store is None and time.monotonic() - began_s > NO_STORE_S
                if self._store is not None:
                    self._exchange(self._store)
                has_more = self._store is None or self._wanted is not None or self._to_tell
                self._awake.wait(ASK_EVERY_S if has_more else None)
                self._awake.clear()
        except Exception as error:  # the store is gone: the plan that there is goes on
            logger.info("ranks do not agree on recorded steps any more: %s", error)

    def _found(self) -> Store | None:
        store: Any = self._find_store()
        clone = getattr(store, "clone", None)  # one connection answers one question at a time
        if clone is not None:
            try:
                return clone()  # type: ignore[no-any-return]
            except (RuntimeError, NotImplementedError):
                pass
        return store  # type: ignore[no-any-return]

    def _exchange(self, store: Store) -> None:
        while self._to_tell:
            plan = self._to_tell[0]
            store.set(KEY.format(plan.number), msgspec.json.encode(plan).decode())
            self._to_tell.pop(0)
        wanted = self._wanted
        if wanted is not None and store.check([KEY.format(wanted)]):
            self._heard = msgspec.json.decode(store.get(KEY.format(wanted)), type=Plan)
            if self._wanted == wanted:
                self._wanted = None


class _State(msgspec.Struct):
    pairs: list[Pair]


def state_path(folder: Path) -> Path:
    return folder / overhead_name()


def _read_state(path: Path) -> list[Pair]:
    try:
        return msgspec.json.decode(read_regular(path), type=_State).pairs
    except (OSError, msgspec.MsgspecError):
        return []


def _write_state(path: Path, meter: Meter) -> None:
    with suppress(OSError):  # a full disk: the next attempt measures anew
        write_whole(path, msgspec.json.encode(_State(meter.pairs())), durable=False)
