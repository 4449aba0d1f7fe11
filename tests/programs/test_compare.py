"""The comparison on two ranks of this machine: what it says, not how fast."""

import msgspec
import numpy as np
import pytest
import torch

from aorta.programs.execute.compare import StrategyComparison, compare, comparison_text
from aorta.programs.execute.problem import DTYPES, Operands, Problem
from aorta.programs.execute.timing import figure_of, median_of
from aorta.programs.language.expr import HostProgramError
from tests.dist.launch import run_ranks

CPU = torch.device("cpu")


OPS = ("ag_gemm", "gemm_rs")


def compared() -> dict[str, str]:
    torch.set_num_threads(1)
    texts = {}
    for op in OPS:
        problem = Problem(op, m=32, n=8, k=16, dtype=torch.bfloat16, num_ranks=2)
        found = compare(problem, CPU, tiles=(2,), streams=(2,), num_rounds=8)
        texts[op] = msgspec.json.encode(found).decode() + "\n" + comparison_text(found)
    return texts


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    first, second = run_ranks(compared, 2)
    assert first == second
    return first


@pytest.fixture(params=OPS)
def outcome(request: pytest.FixtureRequest, outcomes: dict[str, str]) -> tuple[StrategyComparison, str]:
    encoded, _, text = outcomes[request.param].partition("\n")
    return msgspec.json.decode(encoded, type=StrategyComparison), text


def test_serial_and_all_orders_are_compared(outcome):
    found, _ = outcome
    families = {row.family for row in found.rows}
    assert {"serial", "factorized", "developed", "join_hoisted", "both_hoisted", "breadth"} <= families
    assert found.unavailable == {}
    assert found.best in {"serial", found.rows[0].family}
    assert (found.best == "serial") == found.verdict.startswith("overlap loses here")


def test_what_was_not_measured_is_null_with_a_reason(outcome):
    found, _ = outcome
    for row in found.rows:
        for name in ("efficiency", "false_edges"):
            assert (getattr(row, name) is None) == (name in row.not_measured)


def test_the_table_holds_the_verdict_and_every_strategy(outcome):
    found, text = outcome
    assert text.splitlines()[1] == found.verdict
    for row in found.rows:
        assert any(line.startswith(row.family) for line in text.splitlines())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"m": 33}, "m 33 is not a multiple of 2 ranks"),
        ({"op": "gemm_rs", "k": 15}, "splits k 15 over 2 ranks"),
        ({"n": 0}, "n must be at least 1"),
        ({"op": "gather"}, "unknown operation 'gather'"),
    ],
)
def test_impossible_shapes_are_one_line(given, words):
    sizes = {"op": "ag_gemm", "m": 32, "n": 8, "k": 16, "dtype": torch.float32, "num_ranks": 2}
    with pytest.raises(HostProgramError, match=words):
        Problem(**(sizes | given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_integers_stay_exact_in_every_type(dtype, op):
    problem = Problem(op, m=8, n=6, k=4096, dtype=DTYPES[dtype], num_ranks=2)
    parts = [Operands(problem, CPU, rank) for rank in range(2)]
    for part in parts:
        part.fill_integers()
        exact = part.a.double() @ part.w.double()
        assert torch.equal((part.a @ part.w).double(), exact)
        assert exact.abs().max() > 0
    if op == "gemm_rs":
        partial = [part.a @ part.w for part in parts]
        exact = sum(part.a.double() @ part.w.double() for part in parts)
        assert torch.equal((partial[0] + partial[1]).double(), exact)


def test_the_middle_of_rounds_has_an_interval_of_its_median():
    values = np.random.default_rng(1).normal(10.0, 1.0, 400)
    found = median_of(values)
    # The median's standard error is 1.253 sigma / sqrt(n) = 0.063, so 95 % is about 0.123 either side.
    assert found.value == np.median(values)
    assert (found.high - found.low) / 2 == pytest.approx(0.123, rel=0.35)
    assert found.low < 10.0 < found.high


def test_figures_of_rounds_are_drawn_together():
    drift = np.linspace(1.0, 2.0, 60)
    found = figure_of({"a": drift, "b": drift + 0.5}, lambda medians: medians["b"] - medians["a"])
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
