"""What the ranks of the tests run."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aorta.device.streams import MAIN, ThreadStreams
from aorta.programs.execute import collectives
from aorta.programs.execute.collectives import reduce_scatter
from aorta.programs.execute.executor import Execution, lanes_of, streams_needed
from aorta.programs.execute.problem import (
    Arena,
    Operands,
    Problem,
    bind,
    expected,
    in_order_of_ranks,
    reference,
)
from aorta.programs.language.emit import ORDERS, Shape, emit
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Program
from aorta.programs.language.text import parse_program

CPU = torch.device("cpu")


def shapes(num_ranks: int) -> Iterator[tuple[str, Shape]]:
    """Every emitted program: operations x orders x tile orders x streams, rings and pairs, lanes."""
    for op, order in itertools.product(("ag_gemm", "gemm_rs", "gemm_ar"), ORDERS):
        fork, join = ORDERS[order]
        for tile_order, streams in itertools.product(("depth", "breadth"), (1, 3)):
            given: dict[str, Any] = {"op": op, "fork": fork, "join": join, "num_ranks": num_ranks}
            given |= {"num_tiles": 6, "num_streams": streams}
            yield f"{op} {order} {tile_order} n={streams}", Shape(tile_order=tile_order, **given)
        yield f"{op} {order} synchronous", Shape(asynchronous=False, **given)
        yield f"{op} {order} two lanes", Shape(num_lanes=2, **given)
        if op == "ag_gemm":
            yield f"ring {order}", Shape(comm="ring", **given)
            yield f"pairwise {order}", Shape(comm="pairwise", **given)


class Bench:
    """One problem on this rank, and what it takes to run programs of it."""

    def __init__(self, op: str, **sizes: int) -> None:
        self.ranks = dist.get_world_size()
        self.problem = Problem(
            op, **({"m": 36, "n": 5, "k": 12} | sizes), dtype=torch.float64, num_ranks=self.ranks
        )
        self.rank = dist.get_rank()
        self.operands = Operands(self.problem, CPU, self.rank)
        self.operands.fill_integers()
        self.groups = {
            name: dist.new_group(backend="gloo", use_local_synchronization=False)
            for name in ("comm", "comm[0]", "comm[1]")
        }
        group = self.groups["comm"]
        self.products = {bias: reference(self.operands, group, bias) for bias in (False, True)}

    def execution(self, program: Program, **given: Any) -> Execution:
        streams = ThreadStreams(streams_needed(program) + len(lanes_of(program)))
        tensors = bind(program, self.operands, Arena(self.problem.dtype, CPU))
        used = {lane: group for lane, group in self.groups.items()}
        execution = Execution(program, tensors, streams, used, **given)
        execution.poison()
        return execution

    def right(self, execution: Execution) -> bool:
        """Whether C is bit for bit what it is without overlap."""
        tensors, program = execution.tensors, execution.program
        tiles = tensors["C"].shape[0]
        product = self.products["b" in program.buffers()]
        found = in_order_of_ranks(self.problem, tensors["C"])
        return torch.equal(found, expected(self.problem, product, self.rank, tiles))


def run_every_program() -> dict[str, bool]:
    """Whether each program gave the reference's bits, two runs in a row."""
    torch.set_num_threads(1)
    results = {}
    benches = {op: Bench(op) for op in ("ag_gemm", "gemm_rs", "gemm_ar")}
    for label, shape in shapes(dist.get_world_size()):
        bench = benches[shape.op]
        execution = bench.execution(emit(shape))
        for _ in range(2):
            execution.run()
        execution.streams.synchronize()
        results[label] = bench.right(execution)
        execution.streams.close()
    return results | independent_products(benches) | planted_races() | refusals()


def independent_products(benches: dict[str, Bench]) -> dict[str, bool]:
    """The reference itself against a product of all ranks' operands in one piece."""
    results = {}
    for op, bench in benches.items():
        parts: list[Any] = [None] * bench.ranks
        dist.all_gather_object(parts, (bench.operands.a, bench.operands.w))
        a = torch.cat([part[0] for part in parts], dim=0 if op == "ag_gemm" else 1)
        w = bench.operands.w if op == "ag_gemm" else torch.cat([part[1] for part in parts])
        exact = (a[:, :, None] * w[None]).sum(dim=1)
        results[f"reference {op}"] = torch.equal(bench.products[False], exact)
    return results


def planted_races() -> dict[str, bool]:
    """Programs with an edge missing, the late side delayed: wrong. The same delays with the edge: right."""
    results = {}
    for fork in ("none", "hoisted"):
        bench = Bench("ag_gemm")
        program = emit(
            Shape(num_ranks=bench.ranks, fork=fork, num_tiles=6, num_streams=3)  # type: ignore[arg-type]
        )
        execution = bench.execution(program)
        good = bench.operands.a.clone()
        bench.operands.a.fill_(float("nan"))
        # The caller's own stream writes the input late; only a fork makes the workers wait for it.
        execution.streams.submit(MAIN, lambda: _sleep(0.2))
        execution.streams.submit(MAIN, lambda a=bench.operands.a, b=good: a.copy_(b))
        execution.run()
        execution.streams.synchronize()
        results[f"fork {fork}"] = bench.right(execution)
        execution.streams.close()
    for staging in (1, 3):
        bench = Bench("gemm_rs")
        program = emit(
            Shape(op="gemm_rs", num_ranks=bench.ranks, num_tiles=6, num_streams=3, num_staging=staging)
        )
        execution = bench.execution(program)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(collectives, "reduce_scatter", _late_reduce_scatter)
            execution.run()
            execution.streams.synchronize()
        results[f"staging {staging}"] = bench.right(execution)
        execution.streams.close()
    return results


def _late_reduce_scatter(*arguments: Any) -> Any:
    time.sleep(0.03)
    return reduce_scatter(*arguments)


def refusals() -> dict[str, Any]:
    """What is said, on every rank, where ranks would communicate in different orders or counts."""
    bench = Bench("ag_gemm")
    text = {
        "order": [
            _gathers("0, 1", bench) if bench.rank == 0 else _gathers("1, 0", bench),
            "different orders: number 0",
        ],
        "count": [_gathers("0, 1" if bench.rank == 0 else "0", bench), "rank 0 has 2 collectives"],
        "messages": [_message(bench), "disagree about messages"],
    }
    results: dict[str, Any] = {}
    for label, (program, words) in text.items():
        try:
            bench.execution(parse_program(program))
        except HostProgramError as error:
            results[f"refused {label}"] = words in str(error) and "nothing was run" in str(error)
        else:
            results[f"refused {label}"] = False
    return results


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _gathers(tiles: str, bench: Bench) -> str:
    calls = "\n".join(
        f"g[{tile}] = all_gather(A[{tile}], out=G[{tile}], lane=comm)\nwait_work(g[{tile}])"
        for tile in map(int, tiles.split(","))
    )
    return (
        f'program("ag_gemm", ranks={bench.ranks})\nmain = current_stream()\nA = input(2)\nW = input()\n'
        f"G = allocate(2)\nC = output(2)\n{calls}\n"
    )


def _message(bench: Bench) -> str:
    """Rank 0 sends to rank 1, which expects nothing."""
    call = "s[0] = send(A[0], to=1, lane=comm)\nwait_work(s[0])\n" if bench.rank == 0 else ""
    return (
        f'program("ag_gemm", ranks={bench.ranks})\nmain = current_stream()\nA = input(2)\nW = input()\n'
        f"G = allocate(2)\nC = output(2)\n{call}"
    )
