"""The critical path of a replayed step, over ranks, cut into parts with one cause each.

The path is followed backwards from the end of the step on the rank that ends it last: each point came when it
did because of the arc that asked for the latest time. It may pass through the host and through other ranks.
The parts cover the step of that rank without gap or overlap, so they add up to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aorta.timeline.collective import POINT_TO_POINT
from aorta.traces.host_spans import is_data_loading
from aorta.why.replay.activity import work_class
from aorta.why.replay.contention import contention
from aorta.why.replay.draft import NEVER
from aorta.why.replay.graph import ArcKind, NodeKind
from aorta.why.replay.run import Replayed

PartKind = Literal[
    "compute",
    "transfer",
    "late_rank",
    "launch_bound",
    "synchronisation",
    "copy",
    "contention",
    "data_loading",
    "bubble",
    "other",
]

LATE_US = 20.0
"""A lead shorter than this names nobody as late; the residual of the common clock is added."""


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of the critical path."""

    kind: PartKind
    subject: str
    rank: int
    """Rank on which it happened."""
    ms: float
    start_ns: float
    """Begin in ns from the graph's zero, as end_ns."""
    end_ns: float
    evidence: str


def critical_path(replayed: Replayed) -> tuple[PathPart, ...]:
    """The parts of the step in order of time."""
    return _Path(replayed).parts()


def summed(parts: Sequence[PathPart]) -> list[PathPart]:
    """Sum parts by kind and subject, the longest first; rank is -1 if several ranks are in one."""
    groups: dict[tuple[str, str], list[PathPart]] = {}
    for part in parts:
        groups.setdefault((part.kind, part.subject), []).append(part)
    rows = []
    for members in groups.values():
        ranks = {part.rank for part in members}
        longest = max(members, key=lambda part: part.ms)
        rows.append(
            replace(longest, ms=sum(part.ms for part in members), rank=ranks.pop() if len(ranks) == 1 else -1)
        )
    return sorted(rows, key=lambda part: -part.ms)


@dataclass(frozen=True, slots=True)
class _Late:
    """A rank that the others wait for."""

    kind: PartKind
    """A bubble where it is a neighbour in a pipeline."""
    rank: int
    since_ns: float
    """The last but one has come."""
    collective: str

    def marked(self, parts: list[PathPart]) -> list[PathPart]:
        """The parts, cut where the others began to wait; what follows is waiting for this rank."""
        marked = []
        for part in parts:
            if part.end_ns <= self.since_ns:
                marked.append(part)
                continue
            cut = max(part.start_ns, self.since_ns)
            if cut > part.start_ns:
                marked.append(replace(part, end_ns=cut, ms=(cut - part.start_ns) / 1e6))
            evidence = f"before {self.collective} it was in {part.kind}: {part.subject}"
            marked.append(
                PathPart(
                    self.kind, f"rank {self.rank}", part.rank, (part.end_ns - cut) / 1e6, cut, part.end_ns,
                    evidence,
                )
            )  # fmt: skip
        return marked


class _Path:
    def __init__(self, replayed: Replayed) -> None:
        self.replayed = replayed
        self.graph = replayed.step.trace
        self.nodes = self.graph.nodes
        self.time = replayed.time_ns
        self.contention = contention(self.graph)

    def parts(self) -> tuple[PathPart, ...]:
        ends = self.replayed.step.ends
        last = max(ends, key=lambda end: self.time[end.last] - self.time[end.first])
        begin, point = self.time[last.first], last.last
        path: list[PathPart] = []
        late: _Late | None = None
        launched = 0  # parts of the host since the path left the device
        while self.time[point] > begin:
            # Backwards in time: each point came when it did because of one arc, the deciding one.
            arc = self._deciding(point)
            source = self.replayed.arcs.source[arc]
            since = max(begin, min(self.time[source], self.time[point]))
            if self.replayed.arcs.kind[arc] == ArcKind.ARRIVAL:
                late = self._late(source // 2)
            elif late is not None and self.nodes.rank[point // 2] not in (late.rank, -1):
                late = None  # the path has left the late rank: what came before is not its lateness
            kind = self.replayed.arcs.kind[arc]
            if kind == ArcKind.LAUNCH:
                launched = len(path)
            if self.time[point] > since:
                parts = self._parts_of(arc, source, point, since, self.time[point])
                path += reversed(parts if late is None else late.marked(parts))
            if kind == ArcKind.SYNC:
                path[launched:] = self._after_sync(path[launched:], point // 2)
            if source // 2 == 0:  # the root: nothing in the trace came before
                break
            point = source
        path.reverse()
        if path and path[0].start_ns > begin:
            path.insert(0, self._part("other", "before the trace", last.rank, begin, path[0].start_ns, ""))
        return tuple(_joined(path))

    def _after_sync(self, parts: list[PathPart], call: int) -> list[PathPart]:
        """Parts of the host after it had waited for the device, the last one first. As much of them as the
        wait was long is the wait's doing: without it the host would have been ahead by that much."""
        returned_ns = self.time[2 * call + 1] + self._waited(call)
        subject = self._sync_subject(call)
        later: list[PathPart] = []
        for part in parts:
            if part.kind != "launch_bound" or part.start_ns >= returned_ns:
                later.append(part)
                continue
            cut = min(part.end_ns, returned_ns)
            if cut < part.end_ns:
                later.append(replace(part, start_ns=cut, ms=(part.end_ns - cut) / 1e6))
            evidence = f"the device had nothing queued after {subject}: {part.subject}"
            later.append(
                PathPart(
                    "synchronisation", subject, part.rank, (cut - part.start_ns) / 1e6, part.start_ns, cut,
                    evidence,
                )
            )  # fmt: skip
        return later

    def _waited(self, call: int) -> float:
        """Time for which a call kept the host waiting."""
        replayed = self.replayed
        arcs = replayed.arcs_by_target[replayed.first_arc[2 * call + 1] : replayed.first_arc[2 * call + 2]]
        lengths = [replayed.length_ns[arc] for arc in arcs if replayed.arcs.kind[arc] == ArcKind.CALL]
        return self.time[2 * call + 1] - self.time[2 * call] - max(lengths, default=0.0)

    def _sync_subject(self, call: int) -> str:
        return f"{self.nodes.name[call]} ({self.nodes.program[call]})"

    def _late(self, node: int) -> "_Late | None":
        """The last rank to arrive and the time at which all others had; None if its lead is within the
        clocks' error."""
        collective = self.graph.collectives[self.graph.collective_of[node]]
        arrivals = sorted(self.time[2 * member] for member in collective.members)
        limit_us = LATE_US + (self.graph.clock_error_us or 0.0)
        if arrivals[-1] - arrivals[-2] <= 1e3 * limit_us:
            return None
        kind: PartKind = "bubble" if collective.op in POINT_TO_POINT else "late_rank"
        return _Late(kind, self.nodes.rank[node], arrivals[-2], collective.subject)

    def _deciding(self, point: int) -> int:
        """The arc that asked for the latest time."""
        arcs, lengths = self.replayed.arcs, self.replayed.length_ns
        first, last = self.replayed.first_arc[point], self.replayed.first_arc[point + 1]
        candidates = [arc for arc in self.replayed.arcs_by_target[first:last] if lengths[arc] != NEVER]
        return max(candidates, key=lambda arc: (self.time[arcs.source[arc]] + lengths[arc], arcs.kind[arc]))

    def _part(
        self, kind: PartKind, subject: str, rank: int, start: float, end: float, evidence: str
    ) -> PathPart:
        return PathPart(kind, subject, rank, (end - start) / 1e6, start, end, evidence)

    def _parts_of(self, arc: int, source: int, point: int, start: float, end: float) -> list[PathPart]:
        kind = ArcKind(self.replayed.arcs.kind[arc])
        node = point // 2
        rank = self.nodes.rank[node]
        match kind:
            case ArcKind.DURATION:
                return self._of_kernel(node, start, end)
            case ArcKind.TRANSFER:
                return [self._of_transfer(node, start, end)]
            case ArcKind.HOST | ArcKind.CALL:
                return [self._of_host(node, kind, start, end)]
            case ArcKind.SYNC | ArcKind.QUEUE:
                awaited = self._name(source // 2)
                return [
                    self._part(
                        "synchronisation" if kind == ArcKind.SYNC else "launch_bound",
                        self._sync_subject(node),
                        rank, start, end, f"returned after {awaited}",
                    )
                ]  # fmt: skip
            case ArcKind.LAUNCH:
                return [self._of_delay(node, "launch_bound", "launch latency", start, end)]
            case ArcKind.STREAM:
                return [self._of_delay(node, "compute", "gaps between kernels", start, end)]
            case ArcKind.EVENT:
                return [self._of_delay(node, "other", "waits between streams", start, end)]
            case ArcKind.BEGIN:
                return [self._part("other", "before the trace", rank, start, end, "its trace begins here")]
            case _:
                return [self._part("other", kind.name.lower(), rank, start, end, "")]

    def _of_kernel(self, node: int, start: float, end: float) -> list[PathPart]:
        nodes, rank = self.nodes, self.nodes.rank[node]
        name = nodes.name[node]
        if node in self.graph.collective_of:
            return [self._of_transfer(node, start, end)]
        if nodes.kind[node] == NodeKind.COPY:
            return [self._part("copy", name, rank, start, end, f"launched by {nodes.program[node]}")]
        label = work_class(name, nodes.program[node], nodes.unit[node])
        slower = 0.0
        measured_slower = self.contention.slower_ns.get(node, 0.0)
        if measured_slower > 0:
            slower = measured_slower / max(nodes.end_ns[node] - nodes.start_ns[node], 1.0) * (end - start)
        evidence = f"{name[:80]}, launched by {nodes.program[node] or 'a call before the trace'}"
        parts = [self._part("compute", label, rank, start, end - slower, evidence)]
        if slower > 0:
            place, (usual_ns, num_alone) = self.contention.place[node], self.contention.usual_ns[node]
            subject = self.graph.collectives[place].subject if place >= 0 else "a collective"
            parts.append(
                self._part(
                    "contention", f"{label} beside {subject}", rank, end - slower, end,
                    f"{name[:80]} takes {usual_ns / 1e3:.1f} µs alone (median of {num_alone})",
                )
            )  # fmt: skip
        return parts

    def _of_transfer(self, node: int, start: float, end: float) -> PathPart:
        place = self.graph.collective_of.get(node)
        rank = self.nodes.rank[node]
        if place is None:
            return self._part("transfer", self.nodes.name[node][:60], rank, start, end, "")
        collective = self.graph.collectives[place]
        size = "" if collective.size_bytes is None else f"{collective.size_bytes / 2**20:.1f} MiB"
        ranks = "" if collective.num_ranks is None else f"{collective.num_ranks} ranks"
        is_alone = collective.op in POINT_TO_POINT and collective.meeting < 0
        kind: PartKind = "bubble" if is_alone else "transfer"
        if collective.meeting < 0 and kind == "transfer" and (collective.num_ranks or 2) > 1:
            ranks += f"{', ' if ranks else ''}waiting for ranks that were not traced included"
        evidence = ", ".join(
            text for text in (size, ranks, f"group {collective.group}" if collective.group else "") if text
        )
        return self._part(kind, collective.subject, rank, start, end, evidence)

    def _of_host(self, node: int, kind: ArcKind, start: float, end: float) -> PathPart:
        nodes = self.nodes
        program = nodes.program[node] or "between steps"
        if nodes.kind[node] == NodeKind.HOST_STEP:
            program = "between steps"
        part_kind: PartKind = "data_loading" if is_data_loading(program) else "launch_bound"
        evidence = f"until {nodes.name[node]}" if kind == ArcKind.HOST else nodes.name[node]
        return self._part(part_kind, program, nodes.rank[node], start, end, evidence)

    def _of_delay(self, node: int, kind: PartKind, subject: str, start: float, end: float) -> PathPart:
        rank, name = self.nodes.rank[node], self._name(node)
        if node in self.graph.roomless:
            evidence = f"{name} was ready and kernels of another stream filled the device"
            return self._part("contention", "waiting for room on the device", rank, start, end, evidence)
        if node in self.graph.unexplained:
            return self._part("other", "unexplained delay", rank, start, end, f"before {name}")
        return self._part(kind, subject, rank, start, end, f"before {name}")

    def _name(self, node: int) -> str:
        place = self.graph.collective_of.get(node)
        return self.graph.collectives[place].subject if place is not None else self.nodes.name[node][:60]


def _joined(parts: list[PathPart]) -> list[PathPart]:
    """Neighbours of one kind, subject and rank as one part."""
    joined: list[PathPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.subject, last.rank) == (part.kind, part.subject, part.rank):
            longer = last if last.ms >= part.ms else part
            ms = (part.end_ns - last.start_ns) / 1e6
            joined[-1] = PathPart(
                last.kind, last.subject, last.rank, ms, last.start_ns, part.end_ns, longer.evidence
            )
        else:
            joined.append(part)
    return joined
