"""A device that aorta has never heard of is recorded as a GPU is, once there is a backend for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import aorta
from aorta.device import backend as seam
from aorta.device.backend import CPU, accelerator, backend_of
from aorta.device.cuda import CudaBackend
from aorta.record.sources import Sources, _trains_on_cpu
from tests.device.fake_device import FakeBackend, FakeEvent
from tests.device.fake_records import RecordingBackend


@pytest.fixture
def device() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    before = seam.use(backend)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield backend
    dist.destroy_process_group()
    seam.use(before)


class TakesTime:
    """Around the recorder's observer: a collective runs for 10 s per element on the device, an asynchronous
    one on the stream of its group."""

    def __init__(self, observer: Any, device: FakeBackend) -> None:
        self.observer, self.device = observer, device
        self.group_stream = device.new_stream(device.device(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.observer, name)

    def observe(
        self, group: Any, op: str, tensors: Any, num_bytes: int, dtype: str, is_async: bool, launch: Any
    ) -> Any:
        device, ms = self.device, 10_000 * tensors[0].numel()

        def launched() -> Any:
            launch()
            if not is_async:
                device.run(ms)
                return None
            start = device.current.record_event()
            with device.on_stream(self.group_stream):
                device.wait_event(start, self.group_stream)
                device.run(ms)
            return FakeWork(device, self.group_stream.record_event())

        return self.observer.observe(group, op, tensors, num_bytes, dtype, is_async, launched)


class FakeWork:
    def __init__(self, device: FakeBackend, end: FakeEvent) -> None:
        self.device, self.end = device, end

    def wait(self) -> bool:
        """The current stream waits; below what the recorder watches, as in a process group."""
        self.device.wait_event(self.end, self.device.current)
        return True

    def is_completed(self) -> bool:
        return self.end.query()


def recorded(device: FakeBackend, folder: Path, step: Any, **options: Any) -> list[dict[str, Any]]:
    """The lines of two steps."""
    recorder = aorta.instrument(folder, **options)
    recorder.wrap_observers(lambda observer: TakesTime(observer, device))
    with recorder:
        for _ in range(2):
            with recorder.step():
                step()
        device.synchronize()
    return lines_of(folder)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rank_0_metrics.jsonl").read_text().splitlines()]


@pytest.mark.processes
def test_a_step_with_two_collectives_on_a_side_stream(device: FakeBackend, tmp_path: Path) -> None:
    """Seconds, so that the host is ahead of the device however slowly the test runs:

    main   computes 5 | computes 20          | waits 10 | computes 5
    side   waits 5    | first 10 | second 20            |
    """
    side, main = device.new_stream(device.device(0)), device.main

    def step() -> None:
        device.run(5_000)
        side.wait_event(main.record_event())
        with device.on_stream(side):
            dist.all_reduce(torch.ones(1))
        device.run(20_000)
        with device.on_stream(side):
            dist.all_reduce(torch.ones(2))
        main.wait_event(side.record_event())
        device.run(5_000)

    first, second = recorded(device, tmp_path, step)
    for line in (first, second):
        overlap = line["overlap"]
        assert line["step_ms"] == 40_000
        assert overlap["comm_ms"] == 30_000
        assert overlap["hidden_ms"] == 20_000
        assert overlap["exposed_ms"] == 10_000
        assert overlap["compute_ms"] == 30_000
        assert [call["stream"] for call in line["collectives"]] == ["side", "side"]
        assert [(call["start_ms"], call["end_ms"]) for call in line["collectives"]] == [
            (5_000, 15_000),
            (15_000, 35_000),
        ]
        assert line["memory"]["allocated_bytes"] == 100
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["devices"] == [{"kind": "fake", "index": 0, "name": "a device that is not there"}]
    assert run["coverage"]["kernel_records"]["reason"] == "kernel records of fake devices are not known"


@pytest.mark.processes
def test_an_asynchronous_collective_is_timed_on_a_stream_that_waits_for_it(
    device: FakeBackend, tmp_path: Path
) -> None:
    """It runs from 5 s to 15 s; the step waits for it at 10 s."""

    def step() -> None:
        device.run(5_000)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        device.run(5_000)
        assert work is not None
        work.wait()
        device.run(5_000)

    for line in recorded(device, tmp_path, step):
        overlap = line["overlap"]
        assert (line["step_ms"], overlap["comm_ms"], overlap["hidden_ms"]) == (20_000, 10_000, 5_000)
        assert overlap["exposed_ms"] == 5_000
        (call,) = line["collectives"]
        assert (call["stream"], call["start_ms"], call["end_ms"]) == ("group", 5_000, 15_000)


@pytest.mark.processes
@pytest.mark.parametrize(("uses_it", "num_lines"), [(True, 1), (False, 2)])
def test_a_program_that_first_uses_its_device_within_a_step_is_timed_by_it_from_the_second_on(
    device: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_it: bool, num_lines: int
) -> None:
    in_use: list[bool] = []

    def found(*_: Any) -> torch.device:
        return device.device(0) if in_use else torch.device("meta")  # torch calls this device "cpu"

    monkeypatch.setattr(Sources, "device_in_use", found)

    def step() -> None:
        in_use.extend([True] * uses_it)
        device.run(5_000)

    lines = recorded(device, tmp_path, step)
    assert [line["global_step"] for line in lines] == [0, 1][-num_lines:]
    assert {line["source"] for line in lines} == {"events" if uses_it else "host"}
    assert lines[0].get("gap") == ("it began before the program used its device" if uses_it else None)
    assert (lines[-1]["step_ms"] == 5_000) is uses_it


@pytest.mark.processes
def test_dedicated_placement_gives_a_collective_a_stream_of_its_own(
    device: FakeBackend, tmp_path: Path
) -> None:
    def step() -> None:
        device.run(5_000)
        dist.all_reduce(torch.ones(1))
        device.run(5_000)

    line = recorded(device, tmp_path, step, placement="dedicated")[0]
    overlap = line["overlap"]
    assert (line["step_ms"], overlap["comm_ms"], overlap["exposed_ms"]) == (20_000, 10_000, 10_000)
    assert [call["stream"] for call in line["collectives"]] == ["allreduce"]
    assert device.current is device.main


def test_a_device_is_served_by_the_accelerator_or_by_the_cpu() -> None:
    chosen = accelerator()
    assert accelerator() is chosen
    assert backend_of(chosen.device(0)) is chosen
    assert backend_of(torch.device("cpu")) is CPU
    assert (chosen.is_device, CPU.is_device) == (True, False)
    assert chosen.is_available() or chosen.device_in_use() is None


@pytest.mark.parametrize(("reserved_bytes", "on_cpu"), [(0, True), (300, False)])
def test_a_process_without_a_group_is_of_the_cpu_where_it_holds_no_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, reserved_bytes: int, on_cpu: bool
) -> None:
    """On a machine with GPUs, which the recorder has looked at: that alone is no use of them."""
    assert not dist.is_initialized()
    backend = FakeBackend()
    monkeypatch.setattr(backend, "reserved_bytes", lambda index: reserved_bytes)
    assert _trains_on_cpu(backend) is on_cpu


def test_a_gpu_whose_memory_another_allocator_holds_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDAPluggableAllocator's does not tell how much it has reserved."""

    def memory_reserved(index: int) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "memory_reserved", memory_reserved)
    assert CudaBackend().reserved_bytes(0) > 0


def test_a_step_that_a_profiler_traces_has_its_calls_and_no_mark_at_a_collective(
    device: FakeBackend, tmp_path: Path
) -> None:
    """Events around collectives would lengthen what the profiler sees; its trace has the kernels."""
    recording, marks = RecordingBackend(), []
    seam.use(recording)
    record = recording.record
    recording.record = lambda *event: marks.append(event) or record(*event)
    with aorta.instrument(tmp_path, overhead="off") as recorder:
        kernels = recorder._sources.kernels
        for number in range(6):
            if number == 3:
                kernels._profiler.is_busy = True
                kernels._yield_to_profiler()
            with recorder.step():
                num_marks = len(marks)
                dist.all_reduce(torch.ones(4))
                recording.records.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL")
                assert len(marks) == num_marks
    assert marks  # of the steps themselves
    lines = lines_of(tmp_path)
    assert [line["source"] for line in lines] == ["kernels"] * 3 + ["events"] * 3
    for line in lines[3:]:
        assert line["step_ms"] is not None
        assert [call["op"] for call in line["collectives"]] == ["all_reduce"]
        assert line["not_measured"]["overlap"].startswith("torch.profiler")
