"""What holds for every workload at every stream count, on threads as streams."""

import functools
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aorta.queues.workload import Amount
from aorta.queues.workloads import find, workloads
from aorta.queues.workloads.inputs_and_checks import CheckedWorkload
from tests.queues.workloads.driver import driven

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


@pytest.mark.heavy
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


@pytest.mark.heavy
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


class Operations(TorchDispatchMode):
    """Those that compute or move something: no views."""

    def __init__(self, found: "Counter[str]") -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = [result.alias_info for result in func._schema.returns]
        if all(alias is None or alias.is_write for alias in results):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(name: str, num_streams: int) -> "tuple[Counter[str], Amount]":
    """Of one iteration, counted where they run, and what the workload says that it is."""
    found: Counter[str] = Counter()
    with driven(find(name), num_streams) as ran:
        ran.iterate(1)
        submit = ran.streams.submit

        def counted(stream: int, work: Callable[[], object]) -> None:
            def counting() -> None:
                mine: Counter[str] = Counter()
                with Operations(mine):
                    work()
                with lock:
                    found.update(mine)

            submit(stream, counting)

        lock = threading.Lock()
        ran.streams.submit = counted
        ran.iterate(1)
        return found, ran.workload.amount()


@pytest.mark.heavy
@pytest.mark.parametrize("name", workloads())
def test_the_same_work_is_done_at_every_stream_count(name: str):
    counts = stream_counts(name)
    fewest, most = operations(name, counts[0]), operations(name, counts[-1])
    assert fewest == most
    ran, amount = fewest
    assert sum(ran.values()) >= 8
    assert min(amount.operations, amount.samples, amount.units) > 0
