"""The journal: which step is open, which process groups are known, what was seen.

Observers, hooks and the recorder write here from any thread of the process; the sending thread (sending.py)
takes closed steps out at the other end. There is no lock: everything on the hot path is one append, which the
interpreter lock makes whole.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import get_ident
from weakref import ref

import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from aorta.record.interception.works import Kept, TimedWork
from aorta.steps.notes import CollectiveCall, Group, LeftOutStep, RecordedStep

REMEMBERED_GROUPS = 1000
"""Destroyed process groups that are remembered, so that their numbering goes on if they return."""

MOST_EVALUATIONS = 16
"""Limit of evaluations that are remembered for samples of the stack that wait to be told."""


class Journal:
    """Notes of one recorder; `current` is the step that calls are noted in."""

    def __init__(self) -> None:
        self.current: RecordedStep | None = None
        """The step whose window is open: from its start to the next step's start."""
        self.failed: RecordedStep | None = None
        """The step whose body raised last, until the next one begins: a watchdog says where that was."""
        self.closed: deque[RecordedStep | LeftOutStep] = deque()
        """Steps whose window has ended, oldest first, for the sending thread."""
        self.num_seen: Counter[str] = Counter()
        """All collectives, by operation."""
        self.num_outside: Counter[str] = Counter()
        """Collectives in no step: before the first, after the last, of a checkpoint that a thread saves."""
        self.away: str | None = None
        """Reason why nothing can be timed: collectives run on another device than the recorder's."""
        self.pause: str | None = None
        """The activity between two steps that the program has announced: "validation", "checkpoint"."""
        self.may_evaluate_ns = 0
        """Monotonic time of the last batch that was asked for with autograd off; 0 once training went on."""
        self.evaluations: deque[tuple[int, int]] = deque(maxlen=MOST_EVALUATIONS)
        """Monotonic start and end of the latest ones, each from a batch to the last one so far."""
        self.pause_ended_s = 0.0
        """Monotonic time at which the last announced pause ended."""
        self.module: str | None = None
        """The unit of fully_shard that communicates now."""
        self.look_at: Callable[[CollectiveCall], None] | None = None
        """Called with each call, in the few steps in which collective_names.py looks for its origin."""
        self.note_site: Callable[[CollectiveCall], None] | None = None
        """Called with each call, in the few steps in which sites.py looks who issues it."""
        self.trail: Callable[[RecordedStep, CollectiveCall], None] | None = None
        """Called with each call of a step by a watchdog that writes it down outside of this process."""
        self.trail_ends: Callable[[], None] | None = None
        """Called where steps follow whose calls are not seen."""
        self.stopped = False
        """True: the sending thread gave up. Nothing more is noted, or memory would grow."""
        self._groups: dict[str, Group] = {}
        self._num_named: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._groups_by_id: dict[int, tuple[ref[ProcessGroup], Group]] = {}
        """Groups by the object's id, with a weak reference: ids are used again after an object is gone."""
        self._in_flight: deque[Kept] = deque()
        """Asynchronous calls whose tensors are held until the device is done with them, oldest first."""

    # -- process groups --------------------------------------------------------------------------

    def group(self, process_group: ProcessGroup) -> Group:
        """Return our Group of this process group."""
        entry = self._groups_by_id.get(id(process_group))
        if entry is not None and entry[0]() is process_group:
            return entry[1]
        group = self._named_group(process_group)
        group.forget_stream()
        key = id(process_group)
        self._groups_by_id[key] = (ref(process_group, lambda _: self._groups_by_id.pop(key, None)), group)
        return group

    def _named_group(self, process_group: ProcessGroup) -> Group:
        """Return the Group of this key, a new one where other ranks or another purpose have the key now.

        torch gives keys again after a destroy, and programs give descriptions twice. Group and number name a
        collective, so groups of the same ranks get names of their own, counted in the order of first calls.
        """
        key = process_group.group_name
        group, described = self._groups.get(key), _describe(key, process_group)
        if group is not None and (group.described_as, group.ranks) == (
            described.described_as,
            described.ranks,
        ):
            return group
        self._groups[key] = described
        self._num_named[described.name, tuple(described.ranks)] += 1
        number = self._num_named[described.name, tuple(described.ranks)]
        if number > 1:
            described.name = f"{described.name}#{number}"
        if len(self._groups) > 2 * REMEMBERED_GROUPS:
            self._forget_groups()
        return described

    def _forget_groups(self) -> None:
        """Drop the oldest groups that are gone: a script may make and destroy one in every step."""
        alive = {id(group) for _, group in list(self._groups_by_id.values())}
        for key, group in list(self._groups.items())[:-REMEMBERED_GROUPS]:
            if id(group) not in alive:
                del self._groups[key]
                name = group.described_as, tuple(group.ranks)
                if self._num_named[name] == 1:
                    del self._num_named[name]

    def groups(self) -> list[Group]:
        """Return the process groups that communicated so far."""
        return list(self._groups.values())

    def name_of(self, key: str) -> str:
        """Return the name in records of the process group with this key."""
        return self._groups[key].name if key in self._groups else key

    # -- calls -----------------------------------------------------------------------------------

    def add_call(self, call: CollectiveCall) -> None:
        """Number the call within its group and note it in the open step."""
        group = call.group
        call.seq = group.next_seq
        group.next_seq += 1
        self.num_seen[call.op] += 1
        call.module = self.module
        step = self.current
        if self.stopped:
            return
        if step is None or (step.thread != get_ident() and _saves_a_checkpoint()):
            self.num_outside[call.op] += 1
        else:
            step.calls.append(call)
            if self.look_at is not None:
                self.look_at(call)
            if self.note_site is not None:
                self.note_site(call)
            if self.trail is not None:
                self.trail(step, call)

    def withdraw_call(self, call: CollectiveCall) -> None:
        """Take a call back whose launch raised: there is no such collective to wait for."""
        group, step = call.group, self.current
        call.reason = "its launch raised an error"
        if group.next_seq != call.seq + 1:  # another thread has gone on counting, so the number stays taken
            return
        group.next_seq = call.seq
        self.num_seen[call.op] -= 1
        if step is None:
            self.num_outside[call.op] -= 1
        elif step.calls and step.calls[-1] is call:
            step.calls.pop()

    def lost_futures(self, calls: Sequence[CollectiveCall]) -> None:
        """Note that Python dropped the futures of these calls: a wait for them is not seen any more."""
        step = self.current
        if step is not None:
            step.lost_futures += calls

    # -- coalesced groups: one call with members -------------------------------------------------

    def coalescing_started(self, process_group: ProcessGroup) -> None:
        group = self.group(process_group)
        group.coalescing, group.coalesced_tensors = [], []

    def coalescing_ended(self, process_group: ProcessGroup) -> CollectiveCall | None:
        """Return the call that stands for the open group; None where nothing was put into it.

        Its operation is its members', or 'coalesced' if they differ.
        """
        group = self.group(process_group)
        members, group.coalescing = group.coalescing, None
        if not members:
            return None
        ops = {member.op for member in members}
        op = members[0].op if len(ops) == 1 else "send_recv" if ops == {"send", "recv"} else "coalesced"
        dtypes = {member.dtype for member in members}
        call = CollectiveCall(
            group,
            op,
            sum(member.bytes for member in members),
            members[0].dtype if len(dtypes) == 1 else "mixed",
            is_async=True,
        )
        call.members = members
        return call

    # -- tensors of asynchronous calls ----------------------------------------------------------

    def in_flight(self, work: Kept) -> None:
        """Watch an asynchronous call, so that its tensors are dropped when the device is done."""
        if self._in_flight:  # before the append: the call itself has only just been launched
            self.release_finished(2)
        self._in_flight.append(work)

    def release_finished(self, at_most: int = 1000) -> None:
        """Drop the tensors of the oldest calls that were waited for or have ended. Never blocks."""
        in_flight = self._in_flight
        for _ in range(min(at_most, len(in_flight))):
            try:
                work = in_flight[0]
            except IndexError:
                return
            if work.tensors is not None:
                end = work.call.end
                event = None if end is None else end.event
                if event is not None and not event.query():
                    return
                work.tensors = None  # what the device read and wrote is no longer needed
            try:
                in_flight.popleft()
            except IndexError:  # another thread was faster
                return

    def close(self) -> None:
        """Stop listening to works that are still in flight; they only delegate from now on."""
        for work in list(TimedWork._alive):
            work.stop_listening()
        self._in_flight.clear()


def _saves_a_checkpoint() -> bool:
    """True on the thread on which torch.distributed.checkpoint saves beside the training."""
    # Not current_thread(), which would make and keep an object for each of torch's own threads.
    thread = threading._active.get(get_ident())  # type: ignore[attr-defined]
    return thread is not None and thread.name.startswith("AsyncCheckpointExecutor")


def _describe(key: str, process_group: ProcessGroup) -> Group:
    """Make the Group of a process group, named by its description where it has one."""
    description = getattr(process_group, "group_desc", "") or ""
    if description in ("", "undefined", "default_pg"):
        name = "default" if key == "0" or description == "default_pg" else key
    else:
        name = description.removeprefix("mesh_")
    try:
        ranks = dist.get_process_group_ranks(process_group)
    except (KeyError, ValueError, RuntimeError):
        # Not made through torch.distributed (a bare group): only its size is known.
        ranks = list(range(process_group.size()))
    return Group(key, name, ranks, process_group.name().lower())
