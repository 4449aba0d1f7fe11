"""Finds which device work of a rank waits for which: recorded by synchronisation events, else inferred.

Host calls are walked in order of issue. A stream holds the work that its next work has to wait for: its own
last one, and what it was told to wait for. An event holds what its stream held when it was recorded.

A trace says less than that: without synchronisation events no call tells its stream or event, and Kineto
leaves out waits of streams on which no kernel runs, which only pass an order on. What is missing is inferred,
and only where times agree: the producer ends before the consumer starts.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from aorta.why.replay.activity import CallKind, RankActivity, WorkKind

EARLY_NS = 2_000
"""A consumer may start this much before its producer's recorded end: resolution of device clocks."""
NEAR_NS = 30_000
"""Largest ns from the end of awaited work to the start of the work that waited: 2 to 5 µs on CUDA, up to
20 on HIP."""
DELAY_NS = 6_000
"""A start later than this after everything known asks for an explanation."""
REPEATS = 0.5
"""Share of the calls with one signature that must show an edge, for the others to get it."""
BLOCKED_NS = 20_000
"""A synchronising call at least this long was blocked."""
NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class Dependencies:
    """Places in the rank's Work, by consumer."""

    of_work: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Producers of each work, beside the previous work of its own stream."""
    of_call: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Work that each synchronising call waits for."""
    inferred: set[tuple[int, int]] = field(default_factory=set)
    """Producer and consumer among of_work that the trace does not record."""
    inferred_calls: set[int] = field(default_factory=set)
    """Calls of of_call whose producers the trace does not record."""


def dependencies(activity: RankActivity) -> Dependencies:
    """The order between streams, and between the host and the device, of one rank."""
    walk = _Walk(activity)
    walk.run()
    result = walk.dependencies
    _Inference(activity, result).run()
    return result


class _Walk:
    def __init__(self, activity: RankActivity) -> None:
        self.activity = activity
        self.dependencies = Dependencies()
        self.tail: dict[str, int] = {}
        self.pending: dict[str, set[int]] = defaultdict(set)
        self.recorded: dict[int | str, frozenset[int]] = {}
        self.relayed: set[int | str] = set()
        """Records on a stream whose content the trace does not tell."""
        self.guessed: dict[str, set[int]] = {}
        """Pending work of each stream that comes from such a record."""
        self.last_launch: dict[str, int] = {}
        """The latest work that each thread launched."""
        self.by_call: dict[int, list[int]] = defaultdict(list)
        for i, call in enumerate(activity.work.call.tolist()):
            if call >= 0:
                self.by_call[call].append(i)
        self.sync = {wait.correlation: wait for wait in activity.waits}
        self.record_stream = {
            wait.record: wait.record_stream
            for wait in activity.waits
            if wait.record is not None and wait.record_stream is not None
        }
        self.record_of_wait = _records_by_number(activity)
        self.knows_events = any(wait.kind == "Stream Wait Event" for wait in activity.waits)

    def run(self) -> None:
        calls = self.activity.calls
        for i, kind in enumerate(calls.kind.tolist()):
            if kind == CallKind.LAUNCH:
                self.launch(i)
            elif kind == CallKind.RECORD:
                self.record(i)
            elif kind == CallKind.WAIT:
                self.wait(i)
            else:
                self.synchronise(i)

    def launch(self, i: int) -> None:
        work = self.activity.work
        for place in self.by_call[i]:
            stream = work.stream[place]
            # Work that the stream was told to wait for holds up its next work only: later work follows in
            # the order of the stream.
            for producer in self.pending.pop(stream, ()):
                if producer != self.tail.get(stream):
                    self.add(producer, place, producer in self.guessed.get(stream, ()))
            self.guessed.pop(stream, None)
            if not self.knows_events and work.kind[place] == WorkKind.COMM:
                self.before_communication(i, place)
            self.tail[stream] = place
            self.last_launch[self.activity.calls.thread[i]] = place
        if self.activity.calls.name[i].endswith("Memcpy"):  # a synchronous copy launches and then waits
            self.synchronise(i)

    def before_communication(self, i: int, place: int) -> None:
        """A process group makes its stream wait for the caller's before each launch."""
        producer = self.last_launch.get(self.activity.calls.thread[i])
        if producer is not None and self.activity.work.stream[producer] != self.activity.work.stream[place]:
            self.add(producer, place, True)

    def record(self, i: int) -> None:
        correlation = self.activity.calls.correlation[i]
        if correlation is None:
            return
        stream = self.record_stream.get(correlation)
        if stream is not None and (stream in self.tail or self.pending.get(stream)):
            state = set(self.pending.get(stream, ()))
            if stream in self.tail:
                state.add(self.tail[stream])
            self.recorded[correlation] = frozenset(state)
            return
        # A stream without work of its own passes on what was launched just before.
        last = self.last_launch.get(self.activity.calls.thread[i])
        self.recorded[correlation] = frozenset(() if last is None else (last,))
        self.relayed.add(correlation)

    def wait(self, i: int) -> None:
        correlation = self.activity.calls.correlation[i]
        row = self.sync.get(correlation) if correlation is not None else None
        if row is None or row.stream is None:
            return
        record = row.record if row.record is not None else self.record_of_wait.get(row.correlation)
        state = self.recorded.get(record) if record is not None else None
        if state:
            self.pending[row.stream] |= state
            if record in self.relayed:
                self.guessed.setdefault(row.stream, set()).update(state)

    def synchronise(self, i: int) -> None:
        calls, correlation = self.activity.calls, self.activity.calls.correlation[i]
        row = self.sync.get(correlation) if correlation is not None else None
        name = calls.name[i]
        producers: set[int] = set()
        if "Event" in name:
            if row is not None and row.record is not None:
                producers = set(self.recorded.get(row.record, ()))
        elif "Stream" in name or name.endswith("Memcpy"):
            stream = row.stream if row is not None else None
            if stream is not None and stream in self.tail:
                producers = {self.tail[stream]}
        else:
            producers = set(self.tail.values())
        if not producers:  # the trace does not say what it waits for: most likely the thread's own last work
            last = self.last_launch.get(calls.thread[i])
            producers = set() if last is None else {last}
            self.dependencies.inferred_calls.add(i)
        ends = self.activity.work.end_ns
        producers = {p for p in producers if ends[p] <= calls.end_ns[i] + EARLY_NS}
        if producers:
            self.dependencies.of_call[i] = producers

    def add(self, producer: int, consumer: int, is_inferred: bool) -> None:
        work = self.activity.work
        if work.end_ns[producer] > work.start_ns[consumer] + EARLY_NS:
            return  # the consumer started before the producer's end
        self.dependencies.of_work[consumer].add(producer)
        if is_inferred:
            self.dependencies.inferred.add((producer, consumer))


def _records_by_number(activity: RankActivity) -> dict[int | str, int | str]:
    """Call that recorded the event of each wait whose record the profiler did not keep, from the number of
    the event.

    A wait just after a record waits for that record, which ties the event's number to a place among the
    records. Events are numbered as they are made, which is at their first record, so an event with a number
    between two tied ones was recorded between their records, as many records after the first as its number is
    larger.
    """
    sync = {wait.correlation: wait for wait in activity.waits if wait.record is None}
    calls = activity.calls
    is_record = calls.kind == CallKind.RECORD
    # A program's events are made and recorded by one call, a communication library's by another.
    names = Counter(
        name for name, is_of_record in zip(calls.name, is_record.tolist(), strict=True) if is_of_record
    )
    usual = max(names, key=lambda name: ("WithFlags" in name, names[name]), default="")
    records: list[int | str] = []
    place_of: dict[int, int] = {}
    waits: list[tuple[int | str, int, int]] = []
    record_of_wait: dict[int | str, int | str] = {}
    previous: CallKind | None = None
    last: int | str = -1
    last_is_usual = False
    for name, kind, correlation in zip(calls.name, calls.kind.tolist(), calls.correlation, strict=True):
        if correlation is None:
            continue
        if kind == CallKind.RECORD:
            if name == usual:
                records.append(correlation)
            last, last_is_usual = correlation, name == usual
        elif kind == CallKind.WAIT and (row := sync.get(correlation)) is not None and row.event is not None:
            if previous == CallKind.RECORD and not last_is_usual:
                record_of_wait[correlation] = last
            elif previous == CallKind.RECORD:
                place_of[row.event] = len(records) - 1
                waits.append((correlation, row.event, len(records) - 1))
            else:
                waits.append((correlation, row.event, -1))
        previous = CallKind(kind)
    return record_of_wait | _placed(records, place_of, waits)


def _placed(
    records: list[int | str], place_of: dict[int, int], waits: list[tuple[int | str, int, int]]
) -> dict[int | str, int | str]:
    tied = sorted(place_of)
    record_of_wait: dict[int | str, int | str] = {}
    latest: dict[int, int] = {}
    for correlation, event, place in waits:
        if place < 0 and event in latest:
            place = latest[event]  # the same event, waited for by another stream
        elif place < 0:
            place_in_tied = bisect_left(tied, event)
            if 0 < place_in_tied < len(tied):
                previous_event, next_event = tied[place_in_tied - 1], tied[place_in_tied]
                place = min(place_of[previous_event] + event - previous_event, place_of[next_event] - 1)
                place = place if place_of[previous_event] < place else -1
        if 0 <= place < len(records):
            record_of_wait[correlation] = records[place]
            latest[event] = place
    return record_of_wait


class _Inference:
    """Edges for work that starts later than everything known explains, just after work of another stream
    that was launched before it; then for its likes, where nothing had to be waited for."""

    def __init__(self, activity: RankActivity, dependencies: Dependencies) -> None:
        self.activity, self.dependencies = activity, dependencies
        work, calls = activity.work, activity.calls
        self.starts, self.ends = work.start_ns.tolist(), work.end_ns.tolist()
        self.by_end: list[int] = np.argsort(work.end_ns, kind="stable").tolist()
        self.sorted_ends = [self.ends[i] for i in self.by_end]
        self.wait_starts = np.sort(calls.start_ns[calls.kind == CallKind.WAIT]).tolist()
        self.launch_ns = [int(calls.start_ns[c]) if c >= 0 else None for c in work.call.tolist()]
        self.of_stream: dict[str, list[int]] = defaultdict(list)
        for i, stream in enumerate(work.stream):
            self.of_stream[stream].append(i)
        self.starts_of_stream = {
            stream: [self.starts[i] for i in places] for stream, places in self.of_stream.items()
        }
        plain = {name: NUMBER.sub("", name) for name in set(work.name)}
        self.role = [
            (stream, "communication" if kind == WorkKind.COMM else plain[name])
            for stream, name, kind in zip(work.stream, work.name, work.kind.tolist(), strict=True)
        ]
        self.of_role: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for i, launched in enumerate(self.launch_ns):
            if launched is not None:
                self.of_role[self.role[i]].append((launched, i))
        for rows in self.of_role.values():
            rows.sort()

    def run(self) -> None:
        previous = _previous(self.activity.work.stream)
        num_waits: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
        for i, launched in enumerate(self.launch_ns):
            if self.activity.has_host and launched is None:
                continue
            ready = launched if launched is not None else -(2**62)
            if previous[i] >= 0:
                ready = max(ready, self.ends[previous[i]])
            ready = max([ready, *(self.ends[producer] for producer in self.dependencies.of_work.get(i, ()))])
            if self.starts[i] - ready <= DELAY_NS:
                continue
            producer = self._ended_just_before(i, self.starts[i] + EARLY_NS)
            if producer is None:
                producer = self._ended_before_what_filled_the_device(i)
            if producer is not None and self.ends[producer] > ready:
                self._add(producer, i)
                num_waits[self.role[i], self.role[producer]] += 1
        for (consumer_role, producer_role), count in num_waits.items():
            likes = self.of_role[consumer_role]
            if count >= 2 and count >= REPEATS * len(likes):
                for launched, i in likes:
                    self._add_like(i, launched, producer_role)

    def _add(self, producer: int, consumer: int) -> None:
        self.dependencies.of_work[consumer].add(producer)
        self.dependencies.inferred.add((producer, consumer))

    def _add_like(self, i: int, launched: int, producer_role: tuple[str, str]) -> None:
        """The edge from the last work of this role launched before work i, where it ended in time."""
        if any(self.role[producer] == producer_role for producer in self.dependencies.of_work.get(i, ())):
            return
        rows = self.of_role[producer_role]
        row = bisect_left(rows, (launched, -1)) - 1
        if row >= 0 and self.ends[rows[row][1]] <= self.starts[i] + EARLY_NS:
            self._add(rows[row][1], i)

    def _ended_before_what_filled_the_device(self, i: int) -> int | None:
        """Producer of work that a kernel of another stream delayed: ready work has to wait until such a
        kernel leaves room on the device, so it became ready about when that kernel began."""
        streams, start = self.activity.work.stream, self.starts[i]
        for stream, places in self.of_stream.items():
            if stream == streams[i]:
                continue
            row = bisect_left(self.starts_of_stream[stream], start) - 1
            if row >= 0 and self.ends[places[row]] + NEAR_NS > start:
                producer = self._ended_just_before(i, self.starts[places[row]])
                if producer is not None:
                    return producer
        return None

    def _ended_just_before(self, i: int, until_ns: int) -> int | None:
        """Work of another stream that ended within NEAR_NS before a time and was launched before work i,
        with a wait call in between."""
        streams = self.activity.work.stream
        row = bisect_right(self.sorted_ends, until_ns) - 1
        while row >= 0 and until_ns - self.sorted_ends[row] <= NEAR_NS:
            producer = self.by_end[row]
            row -= 1
            if streams[producer] != streams[i] and self._may_order(producer, i):
                return producer
        return None

    def _may_order(self, producer: int, consumer: int) -> bool:
        launched, producer_ns = self.launch_ns[consumer], self.launch_ns[producer]
        if launched is None:
            return not self.activity.has_host
        if producer_ns is not None and producer_ns >= launched:
            return False
        if not self.wait_starts:
            kind = self.activity.work.kind
            return bool(kind[producer] == WorkKind.COMM or kind[consumer] == WorkKind.COMM)
        since = producer_ns if producer_ns is not None else -(2**62)
        first = bisect_left(self.wait_starts, since)
        return first < len(self.wait_starts) and self.wait_starts[first] < launched


def _previous(streams: list[str]) -> list[int]:
    """Place of the previous work of the same stream, -1 for the first."""
    last: dict[str, int] = {}
    previous = []
    for i, stream in enumerate(streams):
        previous.append(last.get(stream, -1))
        last[stream] = i
    return previous
