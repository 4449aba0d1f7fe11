"""Strategies that push into peers' memory, tried with threads for copy engines and ranks."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aorta.device.streams import MAIN
from aorta.programs.execute.problem import Problem, expected
from aorta.programs.execute.strategies import Strategy
from tests.benchmarks.local_peers import LocalBench, Peers

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from pipelining.copy_engine import GatherByCopy, ReduceByCopy, chunk_rows

CALLS = 5

WAYS: dict[str, tuple[str, Callable[[LocalBench], Strategy]]] = {
    "gather": ("ag_gemm", lambda bench: GatherByCopy(bench, bench, 3)),
    "gather in one piece": ("ag_gemm", lambda bench: GatherByCopy(bench, bench, 1)),
    "gather tapered": ("ag_gemm", lambda bench: GatherByCopy(bench, bench, 4, taper=True)),
    "gather by a ring": ("ag_gemm", lambda bench: GatherByCopy(bench, bench, 2, route="ring")),
    "scatter": ("gemm_rs", lambda bench: ReduceByCopy(bench, bench, 3)),
    "scatter in one piece": ("gemm_rs", lambda bench: ReduceByCopy(bench, bench, 1)),
    "all-reduce": ("gemm_ar", lambda bench: ReduceByCopy(bench, bench, 2)),
}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_calls_without_a_barrier_between_them_give_each_its_own_result(way: str, ranks: int) -> None:
    op, make = WAYS[way]
    peers = Peers(Problem(op, m=12 * ranks, n=3, k=2 * ranks, dtype=torch.float64, num_ranks=ranks))
    strategies = [make(bench) for bench in peers.benches]
    inputs = [[bench.operands.a * (call + 1) for call in range(CALLS)] for bench in peers.benches]
    found: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for call in range(CALLS):
        for rank, strategy in enumerate(strategies):
            _submit_call(strategy, inputs[rank][call], found[rank])
    for bench in peers.benches:
        bench.streams.synchronize()
    peers.close()
    for call in range(CALLS):
        for rank, bench in enumerate(peers.benches):
            right = expected(peers.problem, _product_of(peers, inputs, call, rank), rank)
            assert torch.equal(found[rank][call], right), (call, rank, bench.problem)


def _submit_call(strategy: Strategy, values: torch.Tensor, found: list[torch.Tensor]) -> None:
    """Everything in stream order, nothing synchronised: new input, the call, a copy of its result."""
    bench = strategy.bench
    bench.streams.submit(MAIN, lambda: bench.operands.a.copy_(values))
    strategy.submit()
    result = strategy.result()
    bench.streams.submit(MAIN, lambda: found.append(result.clone()))


def _product_of(peers: Peers, inputs: Any, call: int, rank: int) -> torch.Tensor:
    """The whole product by adding up outer products."""
    parts = [of_rank[call] for of_rank in inputs]
    weights = [bench.operands.w for bench in peers.benches]
    gathers = peers.problem.gathers
    a = torch.cat(parts, dim=0 if gathers else 1)
    w = weights[rank] if gathers else torch.cat(weights)
    return (a[:, :, None] * w[None]).sum(dim=1)


@pytest.mark.parametrize(
    ("rows", "num", "taper", "heights"),
    [
        pytest.param(1024, 4, False, [256, 256, 256, 256], id="equal"),
        pytest.param(4096, 4, True, [2048, 1024, 512, 512], id="halves"),
        pytest.param(10, 4, True, [5, 3, 1, 1], id="few rows"),
        pytest.param(2, 4, False, [1, 1], id="fewer rows than pieces"),
        pytest.param(7, 1, True, [7], id="one piece"),
    ],
)
def test_pieces_cover_the_rows(rows: int, num: int, taper: bool, heights: list[int]) -> None:
    pieces = chunk_rows(rows, num, taper)
    assert [end - first for first, end in pieces] == heights
    assert pieces[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
