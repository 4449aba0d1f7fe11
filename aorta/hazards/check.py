"""The check: operations in the order in which the host issues them go in, hazards come out.

A hazard is two accesses to the same bytes, at least one of them a write, on two streams (the host counts as
one) with no order between them:

race    both belong to one allocation.
reuse   the memory was freed in between while another stream might still use it, and has a new owner.
latent  the same, but the next allocation of that stream got other bytes. It strikes under memory pressure.

What lies before the first operation counts as ordered, and so does what was forgotten to bound memory:
hazards may be missed, none is invented. No order between ranks is assumed.

A captured graph is checked once, by itself; a replay is one operation with all of it.

What a rank's host issued, in its order, is a log. An entry is the name of a method of HazardCheck, then its
arguments:

["allocate", 4096, 512, "compute"]
["launch", "compute", [[4096, 512]], [[8192, 512]], 3]
["wait_stream", "reduce", "compute"]
"""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aorta.hazards.order import Moment, Order
from aorta.hazards.segments import MAX_SEGMENTS, Segments, Touch, common_bytes

Kind = Literal["race", "reuse", "latent"]
Hint = tuple[Literal["", "early", "itself"], Any]
Access = Sequence[Any]
"""(address, bytes) or (address, bytes, Strides): the span that an operation touches."""
Entry = Sequence[Any]
EVENT_AT = {"record": 1, "wait": 2, "synchronize_event": 1}
"""Place of the event in an entry."""

HOST = "host"
"""The name of the host among the streams. Every launch comes after what the host did before it."""

_new = tuple.__new__
RULES = {
    (True, False): "reads what is still being written",
    (True, True): "overwrites what is still being written",
    (False, True): "overwrites what is still being read",
}
"""By (the earlier one writes, the later one writes): what the later operation does."""
MAX_EVENTS = 65_536
MAX_FREED = 65_536
"""Freed allocations whose accesses are remembered."""
MAX_TOMBS = 16_384
MAX_HAZARDS = 10_000
MAX_RANGES = 4096
"""Ranges of a captured graph's accesses."""


@dataclass(slots=True)
class Hazard:
    """Two operations that nothing orders, as often as the same two sites met."""

    kind: Kind
    earlier: tuple[Hashable, Any]
    """Stream and site of the operation that was issued first."""
    later: tuple[Hashable, Any]
    """Of the other operation; of reuse found at an allocation, and of latent ones, of the free."""
    rule: str
    """What the later one does to bytes of the earlier one."""
    address: int
    """Of the last pair: what lives there is still known when the check is asked."""
    num_bytes: int
    first_step: int
    count: int = 1
    hint: Hint = ("", None)
    """What the program did instead, and where: recorded the event too early, or waited for its own stream."""
    following: Any = None
    """Of memory that was freed too early: the site of the next allocation; where that has none, of the first
    operation that writes there."""


@dataclass(slots=True)
class _Region:
    """Memory from start to before end: a live allocation, or one that was freed."""

    start: int
    end: int
    stream: int | None
    """Owner's stream; None where the allocation was not seen."""
    owner: int
    segments: Segments = field(default_factory=Segments)
    is_live: bool = True
    is_shared: bool = False
    """Another stream than the owner's has touched it since it was allocated."""
    reused: list[Hazard] = field(default_factory=list)
    """Hazards whose memory this allocation got, until it is known what writes there."""
    recorded: set[int] = field(default_factory=set)
    """Streams that the allocator waits for before it reuses the memory (record_stream)."""


@dataclass(slots=True)
class _Tomb:
    """Freed memory with accesses of other streams that its stream was not behind."""

    start: int
    end: int
    pending: dict[int, Touch]
    site: Any
    is_told: bool = False


@dataclass(slots=True)
class _Recorded:
    moment: Moment
    site: Any


class HazardCheck:
    """State of one rank's check. Streams, events and sites are named by anything hashable."""

    def __init__(self) -> None:
        self.order = Order()
        self.hazards: dict[Any, Hazard] = {}
        self.step = 0
        """Number of the step that operations now belong to."""
        self.num_operations = 0
        self._numbers: dict[Hashable, int] = {HOST: self.order.add_stream()}
        self._names: list[Hashable] = [HOST]
        self._events: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._evicted: list[Moment] = []
        """Latest moment of each stream among the events that were forgotten."""
        self._last_wait: dict[tuple[int, int], tuple[int, Any, Any]] = {}
        """By (waiting, awaited) stream: count that was waited for, site of the record, site of the wait."""
        self._starts: list[int] = []
        self._regions: dict[int, _Region] = {}
        self._freed: deque[tuple[int, int]] = deque()
        self._tombs: dict[int | None, deque[_Tomb]] = {}
        self._num_owners = 0
        self._graphs: dict[Hashable, tuple[list[Access], list[Access]]] = {}
        """What each captured graph reads and writes."""

    # -- order ---------------------------------------------------------------------------------

    def record(self, event: Hashable, stream: Hashable, site: Any = None) -> None:
        """Let the event hold what the stream holds now."""
        x = self._issued(stream)
        self._events[event] = _Recorded(self.order.now(x), site)
        self._events.move_to_end(event)
        if len(self._events) > MAX_EVENTS:
            self._evicted.append(self._events.popitem(last=False)[1].moment)
            if len(self._evicted) > MAX_EVENTS // 16:
                latest = {moment[0]: moment for moment in sorted(self._evicted, key=lambda m: m[1])}
                self._evicted = list(latest.values())

    def wait(self, stream: Hashable, event: Hashable, site: Any = None) -> None:
        """Let the stream wait for what the event held when it was last recorded."""
        x, recorded = self._issued(stream), self._events.get(event)
        if recorded is None:  # recorded before the log began, or forgotten: at most all that was forgotten
            for moment in self._evicted:
                self.order.wait(x, moment)
            return
        other, count, _ = recorded.moment
        self._last_wait[x, other] = (count, recorded.site, site)
        self.order.wait(x, recorded.moment)

    def wait_stream(self, stream: Hashable, other: Hashable, site: Any = None) -> None:
        """Let the stream wait for all that the other one holds now."""
        x, y = self._issued(stream), self._issued(other)
        self._last_wait[x, y] = (self.order.counts[y], site, site)
        self.order.wait(x, self.order.now(y))

    def forget_event(self, event: Hashable) -> None:
        """Note that the event was destroyed."""
        self._events.pop(event, None)

    def synchronize(self, stream: Hashable) -> None:
        """Let the host wait for a stream: a synchronise, a blocking copy, a query that said done."""
        self.order.wait(0, self.order.now(self._number(stream)))

    def synchronize_event(self, event: Hashable) -> None:
        """Let the host wait for an event."""
        recorded = self._events.get(event)
        for moment in self._evicted if recorded is None else [recorded.moment]:
            self.order.wait(0, moment)

    def synchronize_all(self) -> None:
        """Let the host wait for the device."""
        for x in range(1, len(self._names)):
            self.order.wait(0, self.order.now(x))

    def begin_step(self, number: int) -> None:
        """Say which step the following operations belong to."""
        self.step = number

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, address: int, num_bytes: int, stream: Hashable, site: Any = None) -> None:
        """Note that the stream's allocator handed out memory."""
        x, end = self._issued(stream), address + max(num_bytes, 1)
        told, reused = self._unearth(x, address, end, site)
        region = self._take(address, end, x)
        if told:
            region.segments.forget_streams(told)
            region.reused = reused

    def free(
        self,
        address: int,
        site: Any = None,
        stream: Hashable | None = None,
        waits_for_users: bool = False,
    ) -> None:
        """Note that memory was given back to the allocator of the stream that it came from.

        stream: tells it for memory whose allocation was not seen. waits_for_users: the allocator is known to
        wait for all other streams that used the memory, as after record_stream.
        """
        region = self._regions.get(address)
        if region is None or not region.is_live:
            return
        region.is_live = False
        if region.stream is None and stream is not None:
            region.stream = self._number(stream)
        if region.stream is None:
            region.segments.forget()
            return
        if waits_for_users:
            region.recorded.update(range(len(self._names)))
        region.recorded.discard(region.stream)
        late = self._late(region) if region.is_shared else {}
        if region.recorded:  # the allocator waits for all work that these streams hold now
            region.segments.forget_streams(region.recorded)
        if late:
            tombs = self._tombs.setdefault(region.stream, deque(maxlen=MAX_TOMBS))
            tombs.append(_Tomb(region.start, region.end, late, site))
        self._freed.append((address, region.owner))
        if len(self._freed) > MAX_FREED:
            start, owner = self._freed.popleft()
            oldest = self._regions.get(start)
            if oldest is not None and oldest.owner == owner and not oldest.is_live:
                self._remove(oldest)

    def record_stream(self, address: int, stream: Hashable) -> None:
        """Note that the memory's allocator will wait for the stream before it hands the memory out again."""
        region = self._region_at(address)
        if region is not None:
            region.recorded.add(self._number(stream))

    # -- operations ----------------------------------------------------------------------------

    def launch(
        self, stream: Hashable, reads: Iterable[Access] = (), writes: Iterable[Access] = (), site: Any = None
    ) -> None:
        """Add an operation of the stream; of the host, one that the host itself does now."""
        x = self._issued(stream)
        count = self.order.advance(x)
        self.num_operations += 1
        behind, regions = self.order.behind(x), self._regions
        for accesses, is_write in ((reads, False), (writes, True)):
            for access in accesses:
                start = at = access[0]
                end = start + access[1]
                strides = access[2] if len(access) > 2 else None
                while at < end:
                    region = regions.get(at) or self._region_at(at)
                    if region is None or not region.is_live:
                        region = self._unknown(at, end)
                    until = end if end < region.end else region.end
                    # As Touch(...), without its call: this is what the check spends its time on.
                    touch = _new(Touch, (x, count, site, region.owner, is_write, start, end, strides))
                    if x != region.stream:
                        region.is_shared = True
                    if is_write and region.reused:
                        for hazard in region.reused:
                            hazard.following = site if hazard.following is None else hazard.following
                        region.reused = []
                    segments = region.segments
                    for other in (segments.write if is_write else segments.read)(at, until, touch):
                        if other.stream != x and behind.get(other.stream, 0) < other.number:
                            self._conflict(touch, other, region.owner)
                    if len(segments.starts) > MAX_SEGMENTS:
                        segments.forget()
                    at = until

    def capture(self, graph: Hashable, entries: Sequence[Entry]) -> None:
        """Look through what was captured into a graph, by itself; what is found in it is found here."""
        captured = HazardCheck()
        captured.step = self.step
        self.hazards |= play(entries, captured).hazards
        reads, writes = dict[int, int](), dict[int, int]()
        for _, _, *sides, _ in (entry for entry in entries if entry[0] == "launch"):
            for ends, accesses in zip((reads, writes), sides, strict=True):
                for start, num_bytes, *_ in accesses:
                    if len(ends) < MAX_RANGES:
                        ends[start] = max(ends.get(start, 0), start + num_bytes)
        self._graphs[graph] = _accesses(reads), _accesses(writes)

    def replay(self, graph: Hashable, stream: Hashable, site: Any = None) -> None:
        """Run a captured graph on the stream; of one whose capture was not seen nothing is known."""
        if graph in self._graphs:
            self.launch(stream, *self._graphs[graph], site)

    # -- inside --------------------------------------------------------------------------------

    def _number(self, stream: Hashable) -> int:
        number = self._numbers.get(stream)
        if number is None:
            number = self._numbers[stream] = self.order.add_stream()
            self._names.append(stream)
        return number

    def _issued(self, stream: Hashable) -> int:
        """Number of the stream, which from now on is behind what the host has done."""
        x = self._number(stream)
        order = self.order
        if x and order.behind(x).get(0, 0) < order.counts[0]:
            order.wait(x, order.now(0))
        return x

    def _conflict(self, touch: Touch, other: Touch, owner: int) -> None:
        if common_bytes(touch, other):
            kind: Kind = "race" if other.owner == owner else "reuse"
            rule = RULES[other.is_write, touch.is_write]
            start = max(touch.start, other.start)
            self._add(kind, other, touch, rule, start, min(touch.end, other.end) - start)

    def _add(
        self,
        kind: Kind,
        earlier: Touch,
        later: Touch,
        rule: str,
        address: int,
        num_bytes: int,
        following: Any = None,
    ) -> Hazard | None:
        key = (kind, earlier.stream, earlier.site, later.stream, later.site)
        known = self.hazards.get(key)
        if known is not None:
            known.count += 1
            known.address = address
        elif len(self.hazards) < MAX_HAZARDS:
            self.hazards[key] = Hazard(
                kind,
                (self._names[earlier.stream], earlier.site),
                (self._names[later.stream], later.site),
                rule,
                address,
                num_bytes,
                self.step,
                hint=self._hint(earlier, later),
                following=following,
            )
        return self.hazards.get(key)

    def _hint(self, earlier: Touch, later: Touch) -> Hint:
        waited = self._last_wait.get((later.stream, earlier.stream))
        if waited is not None:
            return ("early", waited[1]) if waited[0] < earlier.number else ("", None)
        itself = self._last_wait.get((later.stream, later.stream))
        return ("", None) if itself is None else ("itself", itself[2])

    # Regions

    def _region_at(self, address: int) -> _Region | None:
        i = bisect_right(self._starts, address) - 1
        if i < 0:
            return None
        region = self._regions[self._starts[i]]
        return region if address < region.end else None

    def _unknown(self, start: int, end: int) -> _Region:
        """Make a region for memory whose allocation was not seen: nothing is known of its past."""
        following = bisect_right(self._starts, start)
        if following < len(self._starts):
            end = min(end, self._starts[following])
        old = self._region_at(start)
        if old is not None:  # freed, as far as is known: its new owner was not seen
            end = min(end, old.end)
            region = self._take(start, end, None)
            region.segments.forget()
            return region
        return self._put(_Region(start, end, None, self._new_owner()))

    def _take(self, start: int, end: int, stream: int | None) -> _Region:
        """Make a region of an allocation. It inherits the accesses to freed memory of the same stream."""
        same = self._regions.get(start)
        if same is not None and same.end == end and not same.is_live:  # as the allocator does it mostly
            segments = same.segments if same.stream == stream else Segments()
            region = _Region(start, end, stream, self._new_owner(), segments)
            self._regions[start] = region
            return region
        inherited = Segments()
        for old in self._overlapping(start, end):
            self._remove(old)
            if not old.is_live and old.stream == stream:
                inherited.extend(old.segments.within(start, end))
            for a, b in ((old.start, start), (end, old.end)):
                if a < b:  # what is left of it on either side
                    part = old.segments.within(a, b)
                    rest = _Region(a, b, old.stream, old.owner, part, old.is_live, old.is_shared)
                    self._put(rest)
        return self._put(_Region(start, end, stream, self._new_owner(), inherited))

    def _overlapping(self, start: int, end: int) -> list[_Region]:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        regions = (self._regions[at] for at in self._starts[first:last])
        return [region for region in regions if region.end > start]

    def _put(self, region: _Region) -> _Region:
        insort(self._starts, region.start)
        self._regions[region.start] = region
        return region

    def _remove(self, region: _Region) -> None:
        del self._starts[bisect_left(self._starts, region.start)]
        del self._regions[region.start]

    def _new_owner(self) -> int:
        self._num_owners += 1
        return self._num_owners

    # Freed memory

    def _late(self, region: _Region) -> dict[int, Touch]:
        """Last accesses of other streams that neither the owner's stream nor the allocator waits for."""
        assert region.stream is not None
        behind, late = self.order.behind(region.stream), dict[int, Touch]()
        for touch in region.segments.touches():
            stream = touch.stream
            if (
                stream not in (region.stream, 0)
                and stream not in region.recorded
                and touch.owner == region.owner
                and touch.number > behind.get(stream, 0)
                and (stream not in late or touch.number > late[stream].number)
            ):
                late[stream] = touch
        return late

    def _unearth(self, x: int, start: int, end: int, site: Any) -> tuple[set[int], list[Hazard]]:
        """Tell of freed memory that this allocation of the same stream gets, or could have got.

        Returns the streams that may still use what it gets, and the hazards of that.
        """
        tombs, told, reused = self._tombs.get(x), set[int](), list[Hazard]()
        if not tombs:
            return told, reused
        behind, kept = self.order.behind(x), deque[_Tomb](maxlen=MAX_TOMBS)
        for tomb in tombs:
            late = {s: touch for s, touch in tomb.pending.items() if touch.number > behind.get(s, 0)}
            if not late:
                continue
            is_reused = start < tomb.end and tomb.start < end
            if is_reused or not tomb.is_told:
                for touch in late.values():
                    later = Touch(x, 0, tomb.site, 0, True, tomb.start, tomb.end, None)
                    rule = f"frees{', and hands on,' if is_reused else ''} what is still in use"
                    kind: Kind = "reuse" if is_reused else "latent"
                    hazard = self._add(kind, touch, later, rule, tomb.start, tomb.end - tomb.start, site)
                    if is_reused and hazard is not None:
                        reused.append(hazard)
            if is_reused:
                told.update(late)
            else:
                tomb.is_told = True
                kept.append(tomb)
        self._tombs[x] = kept
        return told, reused


# -- the log -----------------------------------------------------------------------------------


def _accesses(ends: dict[int, int]) -> list[Access]:
    return [(start, end - start) for start, end in ends.items()]


def play(entries: Iterable[Entry], check: HazardCheck) -> HazardCheck:
    """Play a log to a check, and return it."""
    for name, *arguments in entries:
        getattr(check, name)(*arguments)
    return check


def without_events(entries: Iterable[Entry]) -> list[Entry]:
    """Entries with events by the order in which they come, and steps without their numbers: logs that are
    alike then have the same hazards. When events are destroyed is up to c10d's watchdog, and changes none."""
    events: dict[Any, int] = {}
    whole = list[Entry]()
    for entry in entries:
        name = entry[0]
        place = EVENT_AT.get(name)
        if place is not None:
            number = events.setdefault(entry[place], len(events))
            entry = [*entry[:place], number, *entry[place + 1 :]]
        elif name == "begin_step":
            entry = [name]
        elif name == "forget_event":
            continue
        whole.append(entry)
    return whole
