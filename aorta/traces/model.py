"""RankTrace, which every reader of traces returns: one rank's device work as a Timeline, cut into steps.

Beside it what readers share: a rank in a file's name, names of a trace listed in a message.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import msgspec
import numpy as np

from aorta.records.schema import HostKind, HostSpan
from aorta.timeline.arrays import Ints
from aorta.timeline.collective import GroupKey
from aorta.timeline.intervals import subtract, union
from aorta.timeline.matching import UNKNOWN_SIZE, CollectiveKey, RankCalls
from aorta.timeline.types import Kind, Source, Timeline

NS_PER_MS = 1_000_000
RANK_ASSUMED = "the trace does not say its rank: 0 is assumed"
RANK_NAME = r"(?:rank|worker)[-_]?(\d{1,6})(?!\d)"
MOST_LISTED, LONGEST_LISTED = 16, 60
"""Names in a list of a message, and letters of each."""


class TraceCollective(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One communication kernel. What neither metadata nor names tell is None."""

    op: str
    """Operation as in torch.distributed; 'unknown' where nothing tells."""
    start_ms: float
    """Start relative to the origin of RankTrace.timeline, as end_ms."""
    end_ms: float
    group: str | None
    ranks: list[int] | None
    bytes: int | None
    """Bytes of this rank's input or output, the larger."""
    dtype: str | None
    stream: str
    kernel: str
    step: int | None
    """Step that launched it."""
    launch_unix_ns: int | None
    """Start of the runtime call that launched it; None where the trace lacks it."""
    correlation: int | str | None


class LeftOut(str):
    """A note on what is left out of the numbers, which is a warning."""

    __slots__ = ()


class TraceQuality(msgspec.Struct, frozen=True, kw_only=True):
    """Faults and gaps of a trace. Counts are of device activities (kernels, copies, memsets).

    aorta.traces.quality.verdict puts it in words.
    """

    num_activities: int
    num_unlinked: int
    """Activities without the runtime call that launched them: mostly launched before the trace began."""
    num_launches: int | None = None
    """Kernel launches seen on the host; None where the trace holds no host calls."""
    num_launches_without_kernel: int = 0
    """Kernel launches whose kernel the trace lacks: dropped, or not finished when it ended."""
    num_before_launch: int = 0
    """Activities that start before the call that launched them: host and device clocks disagree."""
    worst_before_launch_us: float = 0.0
    num_backwards: int = 0
    """Activities that end before they start; read as empty."""
    num_without_time: int = 0
    """Activities whose times were not recorded; left out."""
    num_missing_dispatches: int = 0
    """Numbers missing from the sequence of dispatches (rocprofv3 numbers them)."""
    num_unknown_collectives: int = 0
    unknown_comm_share: float | None = None
    """Part of the summed time of communication whose operation is unknown; None without any."""
    num_copy_kernels: int = 0
    """Kernels that only copy or fill; they count as compute."""
    copy_kernel_ms: float = 0.0
    num_peer_copies: int = 0
    """Copies from device to device over a link that nothing ties to a collective; they count as copies."""
    peer_copy_ms: float = 0.0
    num_same_stream_overlaps: int = 0
    """Kernels that start before their predecessor on the stream has ended."""
    truncated_steps: tuple[int, ...] = ()
    """Steps that lack the kernel of one of their launches."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's trace, whatever profiler wrote it. Everything in it is of one device."""

    rank: int
    world_size: int | None
    """Ranks of the job, or where only its groups are told, of the largest of these; None: not told."""
    device: str | None
    timeline: Timeline
    """All work of the device; the window is from the first activity's start to the last one's end."""
    steps: list[Timeline]
    """Work launched by each step, same origin as timeline. The window starts when the compute stream
    reaches the step: the later of the step's start on the CPU and the end of the compute stream's
    earlier work; it ends where the next step's starts, the last one's when its own compute-stream
    work and CPU annotation have ended."""
    collectives: list[TraceCollective]
    """Communication kernels in order of their starts."""
    quality: TraceQuality
    launch_step: Ints = field(repr=False)
    """Index into steps of every span of timeline, -1 where it belongs to none."""
    correlation: Sequence[int | str | None] = field(default=(), repr=False)
    """Number of the call that launched each span of timeline; () where the trace was cached or has none."""
    host: str | None = None
    """Name of the machine, where the trace tells."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries, where the trace tells."""
    devices: tuple[str, ...] = ("",)
    """Devices that kernels ran on in the trace; everything here is of one of them."""
    untimed: dict[str, str] = field(default_factory=dict)
    """Kinds of kernels (comm, compute) whose sums are not known, because many lack a duration, and why."""
    host_spans: Sequence[HostSpan] = field(default=(), repr=False)
    """What the host did, in order of starts; same origin as timeline."""
    host_not_shown: dict[HostKind, str] = field(default_factory=dict)
    """Kinds that would not be among host_spans had the host done them, and why."""
    libraries: frozenset[str] = frozenset()
    """What runs the program, by its ranges (aorta.traces.host_spans.LIBRARIES)."""

    @property
    def source(self) -> Source:
        return self.timeline.source

    def window(self, start_unix_ns: int, end_unix_ns: int) -> Timeline:
        """Everything that ran in a window of time, whoever launched it."""
        origin = self.timeline.origin_unix_ns
        return self.timeline.clipped((start_unix_ns - origin) / NS_PER_MS, (end_unix_ns - origin) / NS_PER_MS)


def rank_calls(trace: RankTrace) -> RankCalls:
    """Collectives of a trace in the form that aorta.timeline matches across ranks. Rows are the steps in
    order; where there are none, the whole window is one."""
    line = trace.timeline
    computes = {line.streams[i] for i in line.compute_streams}
    kinds: dict[CollectiveKey, int] = {}
    groups: dict[GroupKey, int] = {}
    row_of_step = {step: row for row, step in enumerate(sorted(of.step or 0 for of in trace.steps))}
    columns = []
    for call in trace.collectives:
        ranks = None if call.ranks is None else tuple(call.ranks)
        size = UNKNOWN_SIZE if call.bytes is None else call.bytes
        stream = "compute" if call.stream in computes else "group"
        kind = (call.op, size, call.dtype or "", len(ranks or ()), stream)
        group = groups.setdefault(GroupKey(ranks, call.group), len(groups))
        row = row_of_step.get(-1 if call.step is None else call.step, -1) if trace.steps else 0
        columns.append((row, kinds.setdefault(kind, len(kinds)), group))
    rows, kind_of, group_of = np.array(columns, dtype=np.int32).reshape(-1, 3).T
    start_ms = np.array([call.start_ms for call in trace.collectives])
    end_ms = np.array([call.end_ms for call in trace.collectives])
    exposed = subtract(
        union(line.intervals(line.kind == Kind.COMM)), union(line.intervals(line.kind == Kind.COMPUTE))
    )
    start_ns, end_ns, exposed_ns = (
        line.origin_unix_ns + np.rint(ms * NS_PER_MS).astype(np.int64) for ms in (start_ms, end_ms, exposed)
    )
    return RankCalls(
        kinds=list(kinds),
        groups=list(groups),
        row=rows,
        kind=kind_of,
        group=group_of,
        seq=np.zeros(len(columns), dtype=np.int64),
        start_ns=start_ns,
        end_ns=end_ns,
        lead_ms=np.full(len(columns), np.nan),
        exposed_ns=exposed_ns,
    )


def known_rank(candidates: Iterable[int | None], notes: list[str]) -> int:
    """The first candidate that is known; 0, with a note, where none is."""
    for rank in candidates:
        if rank is not None:
            return rank
    notes.append(RANK_ASSUMED)
    return 0


def rank_in_name(location: str) -> int | None:
    """Rank by the name: of rank3.json, worker3_step_12.json or rank_3/trace.json; None where it has none.

    The file's own name comes before its folder's, which must say nothing else.
    """
    path = PurePath(location)
    numbers = re.findall(RANK_NAME, path.name)
    if numbers:
        return int(numbers[-1])
    folder = re.fullmatch(RANK_NAME, path.parent.name)
    return int(folder[1]) if folder else None


def listed_names(names: Iterable[object]) -> str:
    """Names from a trace as a list in one line, shortened, without control characters."""
    listed = list(names)
    texts = ["".join(c if c.isprintable() else "?" for c in str(name)) for name in listed[:MOST_LISTED]]
    shortened = [
        text if len(text) <= LONGEST_LISTED else text[: LONGEST_LISTED - 3] + "..." for text in texts
    ]
    return ", ".join([*shortened, *(["..."] if len(listed) > MOST_LISTED else [])])
