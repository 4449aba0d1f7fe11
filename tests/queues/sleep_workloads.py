"""Workloads made by hand: sleeps of known length on worker threads."""

import time
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal

import torch

from aorta.account.results.schema import Checked
from aorta.device.ranks import Ranks
from aorta.errors import AortaError
from aorta.queues.harness.iterate import PointPlan
from aorta.queues.options import Bytes, Dims, Groups, Help, at_least_one
from aorta.queues.workload import Amount, Workload, WorkloadOptions


class SleepOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    sleep_ms: Annotated[float, Help("of each piece")] = 5.0
    pieces: Annotated[int, Help("of an iteration, dealt to the streams in turn")] = 4
    fail: Annotated[bool, Help("claim wrong results")] = False
    stop: Annotated[Literal["interrupt", "no_compiler", "no_memory"] | None, Help("with 2 streams")] = None

    def __post_init__(self) -> None:
        at_least_one(self, "pieces")


class Sleeps(Workload):
    """The same pieces whatever the number of streams; `order` says what ran when."""

    name = "sleeps"
    priority = "P0"
    unit = "naps"
    question = "How long do naps take?"
    stream_meaning = "naps are dealt to N threads in turn"
    max_streams = 8
    Options = SleepOptions
    options: SleepOptions

    def setup(self) -> None:
        self.order: list[tuple[int, int, str]] = []
        self.torn_down = False
        if self.context.num_streams == 2:
            if self.options.stop == "interrupt":
                raise KeyboardInterrupt
            if self.options.stop == "no_compiler":
                raise AortaError("there is no compiler here")
            if self.options.stop == "no_memory":
                torch.empty(2**50, dtype=torch.uint8)

    def iteration(self, index: int) -> None:
        for piece in range(self.options.pieces):
            stream = piece % self.context.num_streams
            self.context.span(stream, "nap", self._nap(index, stream))

    def _nap(self, index: int, stream: int) -> Callable[[], None]:
        def nap() -> None:
            self.order.append((index, stream, "start"))
            torch.zeros(1)  # so that a profiler sees work
            time.sleep(self.options.sleep_ms / 1e3)
            self.order.append((index, stream, "end"))

        return nap

    def amount(self) -> Amount:
        return Amount(operations=self.options.pieces, samples=0, units=self.options.pieces)

    def validate_correctness(self) -> Checked:
        fails = self.options.fail
        return Checked(ok=not fails, detail="asked to fail" if fails else "nothing to compare")

    def teardown(self) -> None:
        self.torn_down = True


class OverlapOptions(WorkloadOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    compute_ms: float = 8.0
    comm_ms: float = 4.0
    comm_size: Annotated[Bytes, Help("of each collective")] = 1024
    mm_dim: Annotated[Dims, Help("M,N,K")] = (8, 8, 8)
    process_groups: Annotated[Groups | None, Help("ranks of each group")] = None


class Overlap(Workload):
    """Compute on stream 0, communication on stream 1, each a sleep."""

    name = "overlap"
    priority = "P1"
    unit = "steps"
    question = "How much is hidden?"
    stream_meaning = "one for compute, one for communication"
    min_streams = 2
    max_streams = 2
    uses_collectives: ClassVar[bool] = True
    Options = OverlapOptions
    options: OverlapOptions

    def setup(self) -> None:
        self.sum = torch.zeros(1)

    def iteration(self, index: int) -> None:
        self._compute(0)
        self._comm(1)

    def _compute(self, stream: int) -> None:
        self.context.span(stream, "compute", lambda: time.sleep(self.options.compute_ms / 1e3))

    def _comm(self, stream: int) -> None:
        self.context.span(stream, "comm.all_reduce", self._all_reduce)

    def _all_reduce(self) -> None:
        time.sleep(self.options.comm_ms / 1e3)
        self.sum.fill_(self.context.rank + 1)
        if self.context.group is not None:
            torch.distributed.all_reduce(self.sum, group=self.context.group)

    def legs(self) -> Mapping[str, Callable[[int], None]]:
        def serial(index: int) -> None:
            self._compute(0)
            self._comm(0)

        return {"compute": lambda _: self._compute(0), "comm": lambda _: self._comm(1), "serial": serial}

    def amount(self) -> Amount:
        return Amount(operations=2, samples=1, units=1)

    def validate_correctness(self) -> Checked:
        group = self.context.group
        ranks = [0] if group is None else torch.distributed.get_process_group_ranks(group)
        expected = sum(rank + 1 for rank in ranks)
        return Checked(ok=float(self.sum) == expected, detail=f"sum {float(self.sum)}, expected {expected}")


def plan(workload: type[Workload] = Sleeps, streams: int = 2, **given: object) -> PointPlan:
    """Few iterations of a made workload; given: fields of its options or of Plan."""
    of_plan = {name: given.pop(name) for name in list(given) if name in PointPlan.__dataclass_fields__}
    settings: dict[str, object] = {
        "iterations": 6,
        "warmup": 1,
        "piece_iterations": 3,
        "leg_rounds": 3,
        "size": "small",
    }
    return PointPlan(workload, workload.Options(**given), streams, **(settings | of_plan))  # type: ignore[arg-type]


def alone() -> Ranks:
    return Ranks()
