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
from aorta.programs.execute.runtime.symmetric import SymmetricBuffer, make_signals, need_symmetric_memory
from aorta.programs.language.expr import HostProgramError

Settings = dict[str, int | str]
Transport = Literal["collective", "limited collective", "send_recv", "copy engine"]
"""collective: what `serial` uses, as it is set up there."""

SIGNAL_SLOTS = {"flags": 256, "kernels": 64}
"""Per sending rank. A pad of 2 KiB holds 64 of the latter for eight ranks."""


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
    made_signals: dict[tuple[str, Streams], Any] = field(default_factory=dict)

    def symmetric(self, name: str, shape: tuple[int, ...]) -> SymmetricBuffer:
        """A buffer that all ranks address; the same one for the same name and shape. Collective when it is
        asked for the first time. Raises HostProgramError or what torch raises where there is none."""
        key = (name, shape)
        need_symmetric_memory(self.device)
        if key not in self.shared:
            self.shared[key] = SymmetricBuffer(shape, self.problem.dtype, self.device, self.group)
        return self.shared[key]

    def signals(self, kind: Literal["flags", "kernels"], num_slots: int) -> Any:
        """Signals between the ranks, for this bench's streams; strategies take turns with them. Collective;
        raises like symmetric()."""
        need_symmetric_memory(self.device)
        if num_slots > SIGNAL_SLOTS[kind]:
            raise HostProgramError(f"{num_slots} signals per rank are more than {SIGNAL_SLOTS[kind]} {kind}")
        assert isinstance(self.streams, DeviceStreams)
        key = (kind, self.streams)
        if key not in self.made_signals:
            self.made_signals[key] = make_signals(
                kind, SIGNAL_SLOTS[kind], self.streams, self.device, self.group, self.control
            )
        return self.made_signals[key]

    @property
    def side(self) -> int:
        """Stream for work that only keeps the device busy."""
        return len(self.streams) - (3 if self.streams.kind == "threads" else 2)

    @property
    def copies(self) -> int:
        """Stream for copies."""
        return self.side + 1

    def submit(self, work: Callable[[], object]) -> None:
        """Submits one call to MAIN."""
        self.streams.submit(MAIN, work)

    @property
    def on_device(self) -> bool:
        return self.device.type == "cuda"


def strategy_streams(num_workers: int, device: torch.device) -> Streams:
    """Workers, a side stream and one for copies; on threads also one that plays the process group's lane.

    Copies have priority: the few kernels that go with them must not queue behind blocks of a multiply.
    """
    if device.type == "cpu":
        return ThreadStreams(num_workers + 3)
    return kept_streams([0] * (num_workers + 1) + [-1], device)


@dataclass(frozen=True)
class StrategyParts:
    """A strategy's communication and multiplies apart from each other, for the waterfall.

    comm and gemm submit all slices of one kind, without the other, in the strategy's own way. beside_comm
    submits the multiplies to MAIN while the communication runs `times` times elsewhere; beside_gemm the
    reverse; they join only their own kind into MAIN. model(comm_ms, gemm_ms, required_only) is how long the
    strategy would take if all its slices of a kind together took that long and nothing else cost anything;
    required_only leaves out waits that the data does not need.
    """

    comm: Callable[[], None]
    gemm: Callable[[], None]
    beside_comm: Callable[[int], None]
    beside_gemm: Callable[[int], None]
    model: Callable[[float, float, bool], float]
    exposed_comm: float
    """Share of the communication that no order hides, however long the multiply: the first slice where
    every multiply needs one (1 / S), 0 where a part of the multiply needs none."""
    exposed_gemm: float
    """Share of the multiply that no order hides, however long the communication."""


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

    def operands_changed(self) -> None:
        """The operands hold other numbers now; a strategy with copies of them renews these."""
        return None

    def parts(self) -> StrategyParts | None:
        """None: an operator that cannot be taken apart."""
        return None

    def communication(self) -> Callable[[], None] | None:
        """Submits all of its communication and nothing else, joined into MAIN; None where that cannot be."""
        parts = self.parts()
        return None if parts is None else parts.comm

    def close(self) -> None:
        """Gives back what outlives the object."""
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
