"""Which ranges are marked, in which order."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from aorta.config.structs import ProfilingConfig
from aorta.device.marks import HostClock
from aorta.record.cpu_observer import CpuObserver
from aorta.record.interception.switch import Interception
from aorta.record.journal import Journal
from aorta.record.ranges import Ranges
from tests.dist.launch import run_ranks


class Markers:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def range_push(self, name: str) -> None:
        self.lines.append(f"+{name}")

    def range_pop(self) -> None:
        self.lines.append("-")


def test_ranges_nest_and_steps_are_named_as_readers_look_for_them() -> None:
    markers = Markers()
    ranges = Ranges(ProfilingConfig(ranges=True), markers)
    with ranges.step(12), ranges("forward"):
        pass
    assert markers.lines == ["+aorta.step#12", "+forward", "-", "-"]


def test_without_the_setting_nothing_is_marked() -> None:
    markers = Markers()
    ranges = Ranges(ProfilingConfig(), markers)
    with ranges.step(0), ranges("forward"):
        pass
    assert markers.lines == []


def test_without_a_gpu_it_is_said_and_harmless(caplog) -> None:
    ranges = Ranges(ProfilingConfig(ranges=True))
    with ranges.step(0), ranges("forward"):
        pass
    assert torch.cuda.is_available() or "there is no GPU" in caplog.text


def test_a_profiler_window_names_them_too(tmp_path: Path) -> None:
    ranges = Ranges(ProfilingConfig())
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    with ranges("backward"):
        torch.ones(2).sum()
    profiler.stop()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert "user_annotation" in {e.get("cat") for e in events if e.get("name") == "backward"}


def collectives_with_ranges() -> list[str]:
    markers = Markers()
    ranges = Ranges(ProfilingConfig(ranges=True), markers)
    observer = ranges.observer(CpuObserver(Journal(), HostClock()))
    interception = Interception({"CPU": observer})
    interception.install()
    try:
        values = torch.ones(4)
        dist.all_reduce(values)
        assert values[0] == 2
        with dist._coalescing_manager(async_ops=True) as works:
            dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        works.wait()
    finally:
        interception.uninstall()
    return markers.lines


def test_collectives_are_marked_with_operation_and_size() -> None:
    lines = run_ranks(collectives_with_ranges, 2)[0]
    assert lines[:2] == ["+aorta.all_reduce 16 bytes float32", "-"]
    assert any(line.startswith("+aorta.") for line in lines[2:])
    assert sum(line[0] == "+" for line in lines) == sum(line == "-" for line in lines)
