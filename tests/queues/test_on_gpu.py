"""The harness on a GPU, with kernels that spin for a known time on one compute unit. Siblings without a GPU:
harness/test_iterate.py, harness/test_pieces.py, harness/test_measure.py."""

from functools import partial

import pytest
import torch

from aorta.account.results.schema import Checked
from aorta.device.ranks import Ranks
from aorta.device.streams import make_streams
from aorta.queues.catalogue import SYNC_MODES
from aorta.queues.harness.iterate import PointPlan, set_up
from aorta.queues.harness.measure import measure_point, measure_this_rank
from aorta.queues.harness.pieces import concurrency
from aorta.queues.options import read_options
from aorta.queues.workload import Amount, Workload
from aorta.queues.workloads import find

pytestmark = pytest.mark.gpu

SPIN_MS = 5.0
NUM_SPINS = 4


def cycles_of(ms: float) -> int:
    """That long a spin, by timing one of many cycles."""
    streams = make_streams(1, torch.device("cuda", 0))
    num = 50_000_000
    for _ in range(2):
        start = streams.record(0, timing=True)
        streams.submit(0, partial(torch.cuda._sleep, num))
        end = streams.record(0, timing=True)
        streams.synchronize()
    return int(num * ms / streams.elapsed_ms(start, end))


class Spins(Workload):
    """The same spins whatever the number of streams."""

    name = "spins"
    priority = "P0"
    unit = "spins"
    question = "Do spins of one compute unit run beside each other?"
    stream_meaning = "spins are dealt to N streams"

    def setup(self) -> None:
        self.cycles = cycles_of(SPIN_MS)

    def iteration(self, index: int) -> None:
        for number in range(NUM_SPINS):
            stream = number % self.context.num_streams
            self.context.span(stream, "spin", partial(torch.cuda._sleep, self.cycles))

    def amount(self) -> Amount:
        return Amount(NUM_SPINS, 0, NUM_SPINS)

    def validate_correctness(self) -> Checked:
        return Checked(ok=True, detail="spins leave nothing")


def plan(streams: int, **more: object) -> PointPlan:
    return PointPlan(Spins, Spins.Options(), streams, "full", iterations=20, warmup=3, **more)  # type: ignore[arg-type]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(device=torch.device("cuda", 0))


@pytest.mark.parametrize(("streams", "at_once"), [(1, 1), (2, 2), (4, 4)])
def test_spins_overlap_as_arithmetic_says(ranks: Ranks, streams: int, at_once: int) -> None:
    found = measure_point(plan(streams), ranks, switch=False)
    expected_ms = NUM_SPINS * SPIN_MS / at_once
    value = {name: metric.value for name, metric in found.metrics.items()}
    assert value["latency_p50_ms"] == pytest.approx(expected_ms, rel=0.1)
    assert value["achieved_concurrency"] == pytest.approx(at_once, rel=0.1)
    assert value["placement_bound"] == pytest.approx(at_once, rel=0.1)
    assert value["slowdown.spin"] == pytest.approx(1, rel=0.1)
    assert value["device_used_bytes"]
    assert found.source == "events"


def test_sync_modes_agree_on_a_busy_device(ranks: Ranks) -> None:
    """Iterations of 20 ms: the three throughputs within 2 %, and only joins leave the device idle."""
    rates, idle = {}, {}
    with set_up(plan(1), ranks) as bench:
        bench.run(3)
        for mode in SYNC_MODES:
            rates[mode] = 20 / bench.run(20, mode).device_ms
            pieces = concurrency(bench.run_pieces(5, mode=mode), bench.run_pieces(2, alone=True))
            assert pieces is not None
            idle[mode] = pieces.idle_share
    assert max(rates.values()) / min(rates.values()) < 1.02
    assert idle["end_only"] < 0.01
    assert idle["none"] < 0.01


def test_a_spin_behind_another_starts_when_that_ends(ranks: Ranks) -> None:
    """Four spins on one stream, submitted at once: delays of 0, 5, 10 and 15 ms."""
    with set_up(plan(1), ranks) as bench:
        bench.run(3)
        pieces = bench.run_pieces(3, mode="per_iteration").pieces
    delays_ms = [piece.start_delay_ms for piece in pieces if piece.iteration == pieces[0].iteration]
    assert delays_ms == pytest.approx([0, SPIN_MS, 2 * SPIN_MS, 3 * SPIN_MS], abs=0.1 * SPIN_MS)


def test_clocks_and_power_or_why_not(ranks: Ranks) -> None:
    found = measure_this_rank(plan(2), ranks)
    assert (found.telemetry is None) == (found.telemetry_reason is not None)


@pytest.mark.parametrize("name", ["tiny_kernel_stress", "graph_subgraphs"])
def test_captured_graphs_compute_the_same(ranks: Ranks, name: str) -> None:
    kind = find(name)
    options = read_options(kind.Options, {"graphs": True})
    found = measure_this_rank(PointPlan(kind, options, 4, "small", iterations=8, warmup=2), ranks)
    assert found.check.ok, found.check.detail
