"""Workload: some work per iteration, put on streams that the harness made.

A workload only submits. The harness forks its streams from MAIN, calls `iteration`, joins them and takes the
times, so that no workload can time itself, forget a stream, or mean something of its own by a sync mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec
import torch
import torch.distributed as dist

from aorta.account.results.schema import Checked
from aorta.device.streams import StreamEvent, Streams
from aorta.queues.catalogue import Priority, Size

Group = dist.ProcessGroup


class WorkloadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a workload's own options: every field becomes a `--flag-with-dashes` of that workload alone.

    aorta.queues.options says which types a field may have.
    """


@dataclass(frozen=True)
class Amount:
    """Amount of an iteration on this rank; ranks are added up. The same at every stream count."""

    operations: float
    """Kernels and collectives submitted."""
    samples: float
    """Requests, rows or sequences served."""
    units: float
    """Units, in the workload's own unit."""


@dataclass(frozen=True)
class DeviceWork:
    """Arithmetic of one iteration on this rank that no schedule can avoid."""

    flops: Mapping[str, float]
    """FLOPs of the matrix units, by data type as aorta/hardware/parts names them: bf16, fp16, tf32, fp32."""


ITERATION = "iteration"
"""Leg of the pieces of `Workload.iteration`, and its name beside the workload's own legs."""
ALONE = "alone"
"""Leg of the pieces of iterations in which every piece followed the one before."""


@dataclass(frozen=True)
class Piece:
    """One `Context.span` as the device saw it, in ms since its iteration's fork."""

    leg: str
    """ITERATION, ALONE, or the name of a leg of the workload."""
    iteration: int
    stream: int
    name: str
    submitted_ms: float
    """Time at which the host began to submit it."""
    start_ms: float
    """Time at which its stream reached it, not later than its first kernel's start."""
    end_ms: float

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms

    @property
    def start_delay_ms(self) -> float:
        """Delay from submission to start. Both clocks are aligned where timing begins, to within a launch."""
        return self.start_ms - self.submitted_ms


@dataclass
class Context:
    """Place and streams that a workload is given."""

    streams: Streams
    device: torch.device
    size: Size
    """full: as the question needs it on a GPU; small: the same program in milliseconds on two CPU cores."""
    rank: int
    world_size: int
    group: Group | None
    """None: no process group, so a workload's communication is simulated (a copy of the same bytes)."""
    seed: int
    span: Callable[[int, str, Callable[[], object]], None]
    """span(stream, name, work): submits like streams.submit; while the harness times single pieces of
    work (achieved concurrency, contention, start delays) it also puts timing events around it. Everything
    that `work` starts on other streams (an asynchronous collective) must be waited for inside `work`, or
    the piece seems to end too early. A name that starts with "comm" is communication, every other one is
    compute; pieces of one name are compared with each other. A workload without a span has no achieved
    concurrency."""
    pieces: list[Piece] = field(default_factory=list)
    """Filled by the harness before it asks for metrics()."""

    @property
    def num_streams(self) -> int:
        return len(self.streams)

    @property
    def collectives(self) -> Literal["real", "simulated"]:
        return "simulated" if self.group is None else "real"

    def after(self, stream: int, *predecessors: int) -> None:
        """Makes later work of `stream` follow everything that the predecessors hold now."""
        for predecessor in predecessors:
            event: StreamEvent = self.streams.record(predecessor)
            self.streams.wait(stream, event)


class Workload(ABC):
    """One file per workload under workloads/, which finds every concrete subclass there."""

    name: ClassVar[str]
    priority: ClassVar[Priority]
    unit: ClassVar[str]
    """Name of Amount.units: "tokens", "GEMMs"."""
    question: ClassVar[str]
    """One sentence that ends in a question mark."""
    stream_meaning: ClassVar[str]
    """Meaning of a stream count of N for the workload."""
    min_streams: ClassVar[int] = 1
    max_streams: ClassVar[int] = 64
    uses_collectives: ClassVar[bool] = False
    Options: ClassVar[type[WorkloadOptions]] = WorkloadOptions

    def __init__(self, context: Context, options: WorkloadOptions) -> None:
        self.context = context
        self.options = options

    @abstractmethod
    def setup(self) -> None:
        """Allocates everything; nothing is allocated in an iteration that could have been here.

        Inputs depend on context.seed and rank alone, so that every stream count computes the same numbers.
        """

    @abstractmethod
    def iteration(self, index: int) -> None:
        """Submits one iteration's work to streams 0 … N−1, never to MAIN. Never synchronises the host unless
        the workload does so by nature (it says so in stream_meaning).

        All streams follow the fork. In sync mode `none` nothing joins them before the next iteration: what
        an iteration reuses of the one before it must be ordered by the workload itself. `index` counts all
        iterations, warm-up included.
        """

    @abstractmethod
    def amount(self) -> Amount:
        """Amount of one iteration."""

    @abstractmethod
    def validate_correctness(self) -> Checked:
        """Compares what the iterations left behind with a reference computed another way (one stream, higher
        precision, or by hand), and that nothing drifted to inf. Called after the timed iterations, with all
        streams joined and the host synchronised."""

    @classmethod
    def refusal(
        cls, num_streams: int, options: WorkloadOptions, device_type: str, world_size: int
    ) -> str | None:
        """Reason why it cannot run, in one line with what would; None where it can. Asked before anything
        is allocated and before a process group exists. min_streams and max_streams are checked already."""
        return None

    def legs(self) -> Mapping[str, Callable[[int], None]]:
        """Other programs over the same work, each with the duties of `iteration`; the harness times them and
        `iteration` in turn, round by round, in this process, after validate_correctness.

        "compute", "comm" and "serial" (both, one after the other) together give overlap efficiency, hidden
        and exposed time of `iteration`. Other names are timed and their pieces kept (Piece.leg).
        """
        return {}

    def device_work(self) -> DeviceWork | None:
        """Work that the throughput is held against at the device's peak rates; None: not stated."""
        return None

    def notes(self) -> list[str]:
        """Remarks on this very run: streams left without work, for instance."""
        return []

    def metrics(self) -> dict[str, float | None]:
        """Further figures of the workload's question, with units in their names; None: not measured."""
        return {}

    def teardown(self) -> None:
        """Gives back what outlives the object (pinned memory, graphs, threads)."""
        return None
