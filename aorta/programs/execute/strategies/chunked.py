"""A host program: tiles on worker streams, collectives on the process group's lane."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from aorta.device.streams import MAIN
from aorta.programs.execute.binding import bind, expected, in_order_of_ranks
from aorta.programs.execute.critical_path import critical_path_ms
from aorta.programs.execute.runtime.executor import Execution, streams_needed
from aorta.programs.execute.strategies.base import Strategy, StrategyBench, StrategyParts, StrategyUnavailable
from aorta.programs.language.emit import ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Gemm


class Chunked(Strategy):
    """The program of aorta.programs.language.emit for an order, S tiles and n streams.

    Rows of C lie by tiles, not by ranks, as in nvFuser: tiles are contiguous and need no extra copy.
    """

    name = "chunked"

    def __init__(
        self,
        bench: StrategyBench,
        order: str,
        tiles: int,
        streams: int,
        *,
        tile_order: str = "depth",
        comm: str = "collective",
        asynchronous: bool = True,
        group: dist.ProcessGroup | None = None,
        name: str = "",
        carve_out: int = 0,
        settings: dict[str, int | str] | None = None,
    ) -> None:
        """group: the lane; default the bench's own. carve_out: SMs that multiplies are asked to leave."""
        chunk_settings: dict[str, int | str] = {"order": order, "tiles": tiles, "streams": streams}
        if tile_order != "depth":
            chunk_settings["tile_order"] = tile_order
        super().__init__(bench, **chunk_settings, **(settings or {}))
        self.name = name or (order if comm == "collective" else f"{comm} send_recv")
        fork, join = ORDERS[order]
        problem = bench.problem
        try:
            shape: Any = dict(op=problem.op, fork=fork, join=join, tile_order=tile_order, comm=comm)
            shape |= dict(num_tiles=tiles, num_streams=streams, num_ranks=problem.num_ranks)
            self.program = emit(Shape(**shape, asynchronous=asynchronous))
            tensors = bind(self.program, bench.operands, bench.arena)
        except HostProgramError as error:
            raise StrategyUnavailable(str(error)) from None
        if streams_needed(self.program, threads=False) > bench.side:
            raise StrategyUnavailable(f"{streams} streams are more than the {bench.side} that were made")
        self.carve_out = carve_out
        if comm != "collective":
            self.transport = "send_recv"
        elif "ctas" in self.settings:
            self.transport = "limited collective"
        lanes = {"comm": group or bench.group}
        self.execution = Execution(self.program, tensors, bench.streams, lanes, control=bench.control)
        self.side = bench.side

    def submit(self) -> None:
        with _carved_out(self.carve_out):
            self.execution.run()

    def result(self) -> torch.Tensor:
        return in_order_of_ranks(self.bench.problem, self.execution.tensors["C"])

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        return expected(self.bench.problem, product, self.bench.rank, self.execution.tensors["C"].shape[0])

    def poison(self) -> None:
        self.execution.poison()

    def parts(self) -> StrategyParts:
        def model(comm_ms: float, gemm_ms: float, required_only: bool) -> float:
            return critical_path_ms(self.program, self.bench.rank, comm_ms, gemm_ms, required_only)

        return StrategyParts(
            comm=lambda: self.execution.run("comm"),
            gemm=self._gemm,
            beside_comm=self._beside_comm,
            beside_gemm=self._beside_gemm,
            model=model,
            # Of a ring every rank multiplies its own tiles without any communication.
            exposed_comm=0.0 if self.transport == "send_recv" else 1 / self.execution.count(Communicate),
            exposed_gemm=1 / self.execution.count(Gemm),
        )

    def _gemm(self) -> None:
        with _carved_out(self.carve_out):
            self.execution.run("gemm")

    def _beside_comm(self, times: int) -> None:
        streams = self.bench.streams
        self._fork_side()
        for _ in range(times):
            self.execution.communicate_on(self.side)
        with _carved_out(self.carve_out):
            for work in self.execution.multiplies():
                streams.submit(MAIN, work)

    def _beside_gemm(self, times: int) -> None:
        streams = self.bench.streams
        self._fork_side()
        with _carved_out(self.carve_out):
            for work in self.execution.multiplies() * times:
                streams.submit(self.side, work)
        self.execution.communicate_on(MAIN)

    def _fork_side(self) -> None:
        streams = self.bench.streams
        streams.wait(self.side, streams.record(MAIN))


@contextmanager
def _carved_out(num_sms: int) -> Iterator[None]:
    """Multiplies launched within leave this many SMs to others, where the library follows the hint."""
    if not num_sms:
        yield
        return
    torch._C._set_sm_carveout_experimental(num_sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
