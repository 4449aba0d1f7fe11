"""Every reader of traces returns a RankTrace: one rank's device work as a Timeline, cut into steps."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import msgspec
import numpy as np
from numpy.typing import NDArray

from aorta.timeline.collective import GroupKey
from aorta.timeline.intervals import subtract, union
from aorta.timeline.matching import RankCalls
from aorta.timeline.types import Kind, Source, Timeline

NS_PER_MS = 1_000_000


class TraceCollective(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One communication kernel. What neither metadata nor names tell is None."""

    op: str
    """As in torch.distributed; 'unknown' where nothing tells."""
    start_ms: float
    """Relative to the origin of RankTrace.timeline, as end_ms."""
    end_ms: float
    group: str | None
    ranks: list[int] | None
    bytes: int | None
    """The larger of the input and the output of this rank."""
    dtype: str | None
    stream: str
    kernel: str
    step: int | None
    """Step that launched it."""
    launch_unix_ns: int | None
    """Start of the runtime call that launched it; None where the trace lacks it."""
    correlation: int | str | None


class TraceQuality(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace lacks. Counts are of device activities (kernels, copies, memsets).

    aorta.traces.quality.verdict puts it in words.
    """

    num_activities: int
    num_unlinked: int
    """Without the runtime call that launched them: started before the trace did, as a rule."""
    num_outside_steps: int
    """In the whole window, in no step: unlinked, or launched before the first or after the last step."""
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
    num_comm_by_metadata_alone: int = 0
    """Classified as communication by metadata though no rule knows the kernel's name."""
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
    rank: int
    world_size: int | None
    device: str | None
    timeline: Timeline
    """Everything on the device; window from the first activity's start to the last one's end."""
    steps: list[Timeline]
    """Work launched by each step, same origin as timeline. The window starts when the compute stream
    reaches the step: the later of the step's start on the CPU and the end of the compute stream's
    earlier work; it ends where the next step's starts, the last one's when its own compute-stream
    work and CPU annotation have ended."""
    collectives: list[TraceCollective]
    """In order of their starts."""
    quality: TraceQuality
    launch_step: NDArray[np.int64] = field(repr=False)
    """Index into steps of every span of timeline, -1 where it belongs to none."""
    correlation: Sequence[int | str | None] = field(default=(), repr=False)
    """Number of the call that launched each span of timeline; () where the trace was cached or has none."""
    host: str | None = None
    """Name of the machine, where the trace tells."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries, where the trace tells."""
    devices: tuple[str, ...] = ("",)
    """That kernels ran on in the trace; everything here is of one of them."""
    untimed: dict[str, str] = field(default_factory=dict)
    """Kinds of kernels (comm, compute) of which so many lack a duration that their sums are not known, and
    why."""

    @property
    def source(self) -> Source:
        return self.timeline.source

    def window(self, start_unix_ns: int, end_unix_ns: int) -> Timeline:
        """Everything that ran in a window of time, whoever launched it."""
        origin = self.timeline.origin_unix_ns
        return self.timeline.clipped((start_unix_ns - origin) / NS_PER_MS, (end_unix_ns - origin) / NS_PER_MS)


def rank_calls(trace: RankTrace) -> RankCalls:
    line = trace.timeline
    collectives = trace.collectives
    keys: dict[tuple[tuple[int, ...] | None, str | None], GroupKey] = {}
    for call in collectives:
        ranks = None if call.ranks is None else tuple(call.ranks)
        keys.setdefault((ranks, call.group), GroupKey(ranks, call.group))
    start_ms = np.array([call.start_ms for call in collectives])
    end_ms = np.array([call.end_ms for call in collectives])
    return RankCalls(
        rank=trace.rank,
        op=[call.op for call in collectives],
        group=[keys[None if call.ranks is None else tuple(call.ranks), call.group] for call in collectives],
        size_bytes=[call.bytes for call in collectives],
        start_ns=line.origin_unix_ns + np.rint(start_ms * NS_PER_MS).astype(np.int64),
        end_ns=line.origin_unix_ns + np.rint(end_ms * NS_PER_MS).astype(np.int64),
        exposed=subtract(
            union(line.intervals(line.kind == Kind.COMM)), union(line.intervals(line.kind == Kind.COMPUTE))
        ),
        origin_ns=line.origin_unix_ns,
    )


MOST = 16
LONGEST = 60

RANK = r"(?:rank|worker)[-_]?(\d{1,6})(?!\d)"


def rank_in_name(location: str) -> int | None:
    """Of rank3.json, worker3_step_12.json or rank_3/trace.json; the file's own name comes before its
    folder's, which must say nothing else."""
    path = PurePath(location)
    numbers = re.findall(RANK, path.name)
    if numbers:
        return int(numbers[-1])
    folder = re.fullmatch(RANK, path.parent.name)
    return int(folder[1]) if folder else None


def listed_names(names: Iterable[object]) -> str:
    """Names that a trace gives, listed in one line whatever is in them."""
    listed = list(names)
    texts = ["".join(c if c.isprintable() else "?" for c in str(name)) for name in listed[:MOST]]
    shortened = [text if len(text) <= LONGEST else text[: LONGEST - 3] + "..." for text in texts]
    return ", ".join([*shortened, *(["..."] if len(listed) > MOST else [])])
