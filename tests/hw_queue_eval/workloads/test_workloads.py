"""What holds for every workload at every stream count, on threads as streams."""

import functools

import pytest
import torch

from aorta.hw_queue_eval.registry import find, workloads
from aorta.hw_queue_eval.workloads.checking import CheckedWorkload
from tests.hw_queue_eval.workloads.drive import driven

Results = dict[str, torch.Tensor]


def stream_counts(name: str) -> list[int]:
    kind = find(name)
    middle = (kind.min_streams + kind.max_streams) // 2
    return sorted({kind.min_streams, middle, kind.max_streams})


CASES = [(name, num) for name in workloads() for num in stream_counts(name)]


@pytest.fixture(autouse=True)
def _one_thread_per_stream():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def results_at_least_streams(name: str) -> Results:
    with driven(find(name), find(name).min_streams) as ran:
        ran.iterate(1)
        assert isinstance(ran.workload, CheckedWorkload)
        return {key: value.clone() for key, value in ran.workload.outputs.items()}


@pytest.mark.parametrize(("name", "num_streams"), CASES)
def test_every_stream_works_and_the_numbers_stay_the_same(name: str, num_streams: int):
    with driven(find(name), num_streams) as ran:
        workload = ran.workload
        assert isinstance(workload, CheckedWorkload)
        ran.iterate(2)
        ran.iterate(3, join=False)
        check = workload.validate_correctness()
        assert check.ok, check.detail
        assert sorted(ran.pieces) == list(range(num_streams))
        expected = results_at_least_streams(name)
        assert workload.outputs.keys() == expected.keys()
        for key, value in workload.outputs.items():
            assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("name", workloads())
def test_without_an_iteration_there_is_nothing_right(name: str):
    with driven(find(name), find(name).min_streams) as ran:
        assert not ran.workload.validate_correctness().ok


@pytest.mark.parametrize("name", workloads())
def test_an_overwritten_result_is_found(name: str):
    with driven(find(name), find(name).min_streams) as ran:
        workload = ran.workload
        assert isinstance(workload, CheckedWorkload)
        ran.iterate(1)
        assert workload.validate_correctness().ok
        for key, output in workload.outputs.items():
            # The last element: in a place that a comparison of beginnings would miss.
            place = output.view(-1)[-1:]
            before = place.clone()
            for wrong in planted(output, before):
                place.copy_(wrong)
                check = workload.validate_correctness()
                assert not check.ok, f"{key}: {wrong} instead of {before}"
                assert "\n" not in check.detail
            place.copy_(before)
        assert workload.validate_correctness().ok


def planted(output: torch.Tensor, before: torch.Tensor) -> list[torch.Tensor]:
    if not output.is_floating_point():
        return [before + 1]
    return [before + 10 * output.abs().max(), torch.full_like(before, torch.nan)]


@pytest.mark.parametrize("name", workloads())
def test_the_amount_of_work_does_not_depend_on_streams(name: str):
    amounts = []
    for num_streams in stream_counts(name)[::2]:
        with driven(find(name), num_streams) as ran:
            amounts.append(ran.workload.amount())
    if find(name).total_work == "constant":
        assert amounts[0] == amounts[-1]
    assert min(amounts[0].operations, amounts[0].samples, amounts[0].units) > 0
