"""A host program: tiles on worker streams, collectives on the process group's lane."""

from typing import Any

import torch
import torch.distributed as dist

from aorta.programs.execute.binding import bind, expected, in_order_of_ranks
from aorta.programs.execute.runtime.executor import Execution, streams_needed
from aorta.programs.execute.strategies.base import Strategy, StrategyBench, StrategyUnavailable
from aorta.programs.language.emit import ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError


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
    ) -> None:
        """group: the lane; default the bench's own."""
        chunk_settings: dict[str, int | str] = {"order": order, "tiles": tiles, "streams": streams}
        if tile_order != "depth":
            chunk_settings["tile_order"] = tile_order
        super().__init__(bench, **chunk_settings)
        self.name = order if comm == "collective" else f"{comm} send_recv"
        fork, join = ORDERS[order]
        problem = bench.problem
        try:
            shape: Any = dict(op=problem.op, fork=fork, join=join, tile_order=tile_order, comm=comm)
            shape |= dict(num_tiles=tiles, num_streams=streams, num_ranks=problem.num_ranks)
            self.program = emit(Shape(**shape, asynchronous=asynchronous))
            tensors = bind(self.program, bench.operands, bench.arena)
        except HostProgramError as error:
            raise StrategyUnavailable(str(error)) from None
        if streams_needed(self.program, threads=False) > bench.num_workers:
            raise StrategyUnavailable(f"{streams} streams: only {bench.num_workers} were made")
        if comm != "collective":
            self.transport = "send_recv"
        lanes = {"comm": group or bench.group}
        self.execution = Execution(self.program, tensors, bench.streams, lanes, control=bench.control)

    def submit(self) -> None:
        self.execution.run()

    def result(self) -> torch.Tensor:
        return in_order_of_ranks(self.bench.problem, self.execution.tensors["C"])

    def expected(self, product: torch.Tensor) -> torch.Tensor:
        return expected(self.bench.problem, product, self.bench.rank, self.execution.tensors["C"].shape[0])

    def poison(self) -> None:
        self.execution.poison()
