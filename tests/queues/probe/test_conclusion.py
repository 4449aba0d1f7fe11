"""From measurements to a sentence, and the command line."""

import msgspec
import pytest
import torch
from click.testing import CliRunner

from aorta.queues.cli import main
from aorta.queues.probe.priority import effect
from aorta.queues.probe.probe import ProbeResult, conclude
from aorta.queues.probe.show import show_probe
from aorta.queues.probe.staircase import staircase
from aorta.queues.probe.switch import switch_cost
from tests.queues.probe.simulator import SimulatedDevice

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def _result(device: SimulatedDevice) -> ProbeResult:
    """All parts, on a simulated device."""
    queues = staircase(device)
    pair = SimulatedDevice(2, 2, event_us=device.event_us)

    def make(priorities):
        return SimulatedDevice(len(priorities), 8, priorities=priorities, resident_ctas=8)

    return ProbeResult(
        schema=1,
        device="simulated",
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": None},
        num_streams=device.num_streams,
        clock=device.clock,
        queues=queues,
        switch=switch_cost(pair, lengths=(4, 8, 16), repetitions=6),
        effect=effect(make, -2),
        not_measured={},
        seconds=1.0,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("order", ["start", "barrier"])
@pytest.mark.parametrize("queues", [1, 2, 8, 32])
def test_the_number_is_that_of_the_device(queues, order):
    found = conclude(staircase(SimulatedDevice(64, queues, order, noise_us=1.0)))
    assert (found.queues, found.at_least) == (queues, False)
    assert f"{queues} of up to 64 streams start at once" in found.because


def test_more_queues_than_streams_cannot_be_counted():
    found = conclude(staircase(SimulatedDevice(16, 32)))
    assert (found.queues, found.at_least) == (16, True)


def test_starts_and_times_that_disagree_give_no_number():
    found = conclude(msgspec.structs.replace(staircase(SimulatedDevice(16, 4)), from_times=2, agrees=False))
    assert found.queues is None
    assert "4 of up to 16" in found.because
    assert "fit 2 evenly filled queues" in found.because


@pytest.mark.parametrize("seed", range(4))
def test_queues_dealt_at_random_give_no_number(seed):
    device = SimulatedDevice(24, 4, is_random=True, record_blocks=False, seed=seed)
    assert conclude(staircase(device)).queues is None


def test_doubts_are_said():
    device = SimulatedDevice(16, 4, queue_of=lambda stream: max(0, stream - 12), primed=False)
    because = conclude(staircase(device)).because
    assert "unevenly" in because
    assert "launch-bound" in because


@pytest.mark.heavy
def test_a_result_survives_json_and_can_be_shown(capsys):
    from rich.console import Console

    result = _result(SimulatedDevice(16, 4, event_us=2.0))
    again = msgspec.json.decode(msgspec.json.encode(result), type=ProbeResult)
    assert again == result
    show_probe(again, Console(width=110))
    shown = capsys.readouterr().out
    assert "hardware queues   4" in shown
    assert "+2.000 µs" in shown
    assert "in a shared queue kernels start in order of submission" in shown


@NO_GPU
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "probe needs a GPU"),
        (["--json"], "probe needs a GPU"),
        (["--streams", "0"], "from 2 to 128, got 0"),
        (["--streams", "10000"], "from 2 to 128"),
        (["--device", "toaster"], "try cuda:0"),
        (["--device", "cpu"], "probe needs a GPU"),
    ],
)
def test_what_cannot_be_probed_is_one_line_and_exit_2(arguments, words):
    outcome = CliRunner().invoke(main, ["probe", *arguments])
    assert outcome.exit_code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    assert words in outcome.stderr
