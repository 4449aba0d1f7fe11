"""What a workload is: some work per iteration, put on streams that the harness made.

A workload only submits. The harness forks its streams from MAIN, calls `iteration`, joins them and takes the
times, so that no workload can time itself, forget a stream, or mean something of its own by a sync mode.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec
import torch
import torch.distributed as dist

from aorta.device.streams import Event, Streams

Category = Literal["latency_sensitive", "distributed", "inference", "pipeline"]
Priority = Literal["P0", "P1", "P2", "P3"]
Size = Literal["small", "full"]
Group = dist.ProcessGroup


class WorkloadOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of a workload's own options: every field becomes a `--flag-with-dashes` of that workload alone."""


@dataclass(frozen=True)
class Amount:
    """What one iteration does, for throughput; equal for every stream count unless `total_work` says no."""

    operations: float
    """Kernels and collectives submitted."""
    samples: float
    """Requests, rows or sequences served."""
    units: float
    """In the workload's own unit."""


@dataclass(frozen=True)
class Check:
    """Outcome of validate_correctness."""

    ok: bool
    detail: str
    """What was compared, and the largest error; says what is wrong where it is."""


@dataclass
class Context:
    """What a workload gets: where it runs and the streams it may use."""

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
    work (achieved concurrency, start delays) it also puts timing events around it."""

    @property
    def num_streams(self) -> int:
        return len(self.streams)

    @property
    def collectives(self) -> Literal["real", "simulated"]:
        return "simulated" if self.group is None else "real"

    def after(self, stream: int, *others: int) -> None:
        """Later work of `stream` follows everything that `others` hold now."""
        for other in others:
            event: Event = self.streams.record(other)
            self.streams.wait(stream, event)


class Workload(ABC):
    """One file per workload under workloads/<category>/; the registry finds every concrete subclass there."""

    name: ClassVar[str]
    category: ClassVar[Category]
    priority: ClassVar[Priority]
    unit: ClassVar[str]
    """Of Amount.units, in words: "tokens", "GEMMs"."""
    question: ClassVar[str]
    """One sentence that ends in a question mark."""
    stream_meaning: ClassVar[str]
    """What a stream count of N means here."""
    min_streams: ClassVar[int] = 1
    max_streams: ClassVar[int] = 64
    uses_collectives: ClassVar[bool] = False
    total_work: ClassVar[str] = "constant"
    """Over a stream sweep: "constant", or the reason why it is not."""
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
        """Submits one iteration's work to streams 0 … N−1. Never synchronises the host unless the workload
        does so by nature (it says so in stream_meaning)."""

    @abstractmethod
    def amount(self) -> Amount:
        """Of one iteration."""

    @abstractmethod
    def validate_correctness(self) -> Check:
        """Compares what the iterations left behind with a reference computed another way (one stream, higher
        precision, or by hand), and that nothing drifted to inf. Called after the timed iterations, with all
        streams joined and the host synchronised."""

    def metrics(self) -> dict[str, float | None]:
        """Further figures of the workload's question, with units in their names; None: not measured."""
        return {}

    def teardown(self) -> None:
        """Gives back what outlives the object (pinned memory, graphs, threads)."""
        return None
