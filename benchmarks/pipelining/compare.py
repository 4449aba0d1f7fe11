"""Copies by copy engines beside the orders of a host program and torch's fused operators, for one shape.

    torchrun --nproc_per_node 2 -- benchmarks/pipelining/compare.py --op ag_gemm --m 65536 --n 1024 --k 4096

It is `aorta program compare` with further strategies. Needs GPUs that reach each other's memory; without them
it says why the copies are not available. Half a minute a shape.
"""

import sys
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1]))

from pipelining.copy_engine import GatherByCopy, ReduceByCopy
from pipelining.peers import Peers

from aorta.programs.cli import JSON, print_result
from aorta.programs.execute.cli import sizes
from aorta.programs.execute.compare import compare, comparison_text
from aorta.programs.execute.session import Family, Make, problem_of, ranks, refuse_long_multiply
from aorta.programs.execute.strategies import StrategyBench
from aorta.programs.language.emit import OPS

CHUNKS = (1, 2, 4, 8, 16)
"""Numbers of pieces to try."""
COPY_PRIORITY = -1
"""The few kernels that go with copies must not queue behind blocks of a multiply."""


def copy_families(op: str) -> list[Family]:
    """The alternatives of each route; strategies of one bench share their buffers."""
    shared: dict[int, Peers] = {}

    def peers(bench: StrategyBench) -> Peers:
        return shared.setdefault(id(bench), Peers(bench))

    def gather(chunks: int, **options: Any) -> Make:
        return lambda bench: GatherByCopy(bench, peers(bench), chunks, **options)

    def reduce(chunks: int) -> Make:
        return lambda bench: ReduceByCopy(bench, peers(bench), chunks)

    if op != "ag_gemm":
        return [Family("copy engine ring", [reduce(chunks) for chunks in CHUNKS])]
    tapered = [gather(chunks, taper=True) for chunks in CHUNKS[1:4]]
    return [
        Family("copy engine pairwise", [*map(gather, CHUNKS), *tapered]),
        Family("copy engine ring", [gather(chunks, route="ring") for chunks in CHUNKS[:4]]),
    ]


@click.command(help=__doc__)
@click.option("--op", type=click.Choice(OPS), required=True)
@sizes
@JSON
def main(op: str, as_json: bool, **options: Any) -> None:
    with ranks() as device:
        problem = problem_of(op, options)
        refuse_long_multiply(problem, device)
        found = compare(
            problem, device, (1, 2, 4, 8, 16), (1, 2, 4, 8), options["num_rounds"], copy_families(op),
            [COPY_PRIORITY],
        )  # fmt: skip
        is_first = dist.get_rank() == 0
    if is_first:
        print_result(as_json, found, lambda: comparison_text(found))


if __name__ == "__main__":
    main()
