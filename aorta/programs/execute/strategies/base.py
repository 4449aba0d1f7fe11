"""A strategy, and the parts that all strategies share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from aorta.device.streams import MAIN, DeviceStreams, Streams, ThreadStreams, kept_streams
from aorta.programs.execute.binding import Arena, expected
from aorta.programs.execute.problem import Operands, Problem
from aorta.programs.execute.runtime.symmetric import FlagSignals, SymmetricBuffer, need_symmetric_memory
from aorta.programs.language.expr import HostProgramError

Settings = dict[str, int | str]
Transport = Literal["collective", "send_recv", "copy engine"]
"""collective: what `serial` uses, as it is set up there."""

SIGNAL_SLOTS = 256
"""Flags per sending rank."""


class StrategyUnavailable(Exception):
    """Reason why a strategy cannot run here; the same on every rank."""


@dataclass
class StrategyBench:
    """Bench of all strategies: one set of operands, buffers and streams, so that strategies are compared and
    not their memory. Make streams with strategy_streams()."""

    problem: Problem
    operands: Operands
    arena: Arena
    streams: Streams
    device: torch.device
    rank: int
    group: dist.ProcessGroup
    """Collectives of the plain kind; normal priority, default number of CTAs."""
    control: dist.ProcessGroup | None = None
    """Group for agreements between hosts, which need no device."""

    shared: dict[tuple[str, tuple[int, ...]], SymmetricBuffer] = field(default_factory=dict)
    made_signals: dict[Streams, FlagSignals] = field(default_factory=dict)

    def symmetric(self, name: str, shape: tuple[int, ...]) -> SymmetricBuffer:
        """A buffer that all ranks address; the same one for the same name and shape. Collective when it is
        asked for the first time. Raises HostProgramError or what torch raises where there is none."""
        key = (name, shape)
        need_symmetric_memory(self.device)
        if key not in self.shared:
            self.shared[key] = SymmetricBuffer(shape, self.problem.dtype, self.device, self.group)
        return self.shared[key]

    def signals(self, num_slots: int) -> Any:
        """Signals between the ranks, for this bench's streams; strategies take turns with them. Collective;
        raises like symmetric()."""
        need_symmetric_memory(self.device)
        if num_slots > SIGNAL_SLOTS:
            raise HostProgramError(f"{num_slots} signals per rank are more than {SIGNAL_SLOTS} flags")
        assert isinstance(self.streams, DeviceStreams)
        if self.streams not in self.made_signals:
            self.made_signals[self.streams] = FlagSignals(
                SIGNAL_SLOTS, self.streams, self.device, self.group, self.control or self.group
            )
        return self.made_signals[self.streams]

    @property
    def num_workers(self) -> int:
        """Streams for tiles, numbered from 0."""
        return len(self.streams) - (2 if self.streams.kind == "threads" else 1)

    @property
    def copies(self) -> int:
        """Stream for copies, the one after the workers."""
        return self.num_workers

    def submit(self, work: Callable[[], object]) -> None:
        """Submits one call to MAIN."""
        self.streams.submit(MAIN, work)


def strategy_streams(num_workers: int, device: torch.device) -> Streams:
    """Workers and a stream for copies; on threads also one that plays the process group's lane.

    Copies have priority: the few kernels that go with them must not queue behind blocks of a multiply.
    """
    if device.type == "cpu":
        return ThreadStreams(num_workers + 2)
    return kept_streams([0] * num_workers + [-1], device)


class Strategy(ABC):
    """One way to compute C. Constructing it is collective, and raises Unavailable on all ranks or none."""

    name: str
    note: str = ""
    transport: Transport = "collective"
    """Carrier of the bytes."""

    def __init__(self, bench: StrategyBench, **settings: int | str) -> None:
        self.bench = bench
        self.settings: Settings = settings

    @property
    def label(self) -> str:
        details = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name} {details}".strip()

    @abstractmethod
    def submit(self) -> None:
        """Submits one computation of C to MAIN and what it forks; joined into MAIN. The host does not wait.
        Allocates nothing, unless the operator under test does so itself (its note says so)."""

    @abstractmethod
    def result(self) -> torch.Tensor:
        """C of the last submit, as expected() has it; valid until the next but one."""

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        """Part of reference() that this rank holds."""
        return expected(self.bench.problem, product, self.bench.rank)

    @abstractmethod
    def poison(self) -> None:
        """Fills outputs and staging with NaN. Called while no rank runs anything."""

    def communication(self) -> Callable[[], None] | None:
        """Call that submits all of its communication and nothing else, joined into MAIN."""
        return None


def first_line(error: Exception) -> str:
    """First line of the error's message, or its type where it has none."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def chunk_rows(rows: int, num: int, taper: bool = False, multiple: int = 256) -> list[tuple[int, int]]:
    """[first, end) of num pieces of consecutive rows, cut at multiples where there are rows enough.

    taper: each piece half of what is left, the last two alike: few multiplies, and a short last one.
    """
    num = min(num, rows)
    shares = [0.5 ** min(i + 1, num - 1) for i in range(num)] if taper else [1 / num] * num
    step = multiple if rows >= multiple * num * (2 if taper else 1) else 1
    ends, reached = [], 0.0
    for share in shares:
        reached += share
        ends.append(round(reached * rows / step) * step)
    ends[-1] = rows
    pieces = list(zip([0, *ends[:-1]], ends, strict=True))
    return [(first, end) for first, end in pieces if end > first]
