"""The driver is asked about captures only while torch has one open."""

import pytest
import torch

from aorta.device.backend import accelerator
from aorta.record.interception.stalls import CaptureWatch


class Graph:
    """Stands in for torch.cuda.CUDAGraph, which needs a device."""

    def capture_begin(self, fails: bool = False) -> str:
        if fails:
            raise RuntimeError("planted")
        return "begun"

    def capture_end(self, fails: bool = False) -> None:
        if fails:
            raise RuntimeError("planted")


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(accelerator(), "is_capturing", lambda: True)
    methods = dict(vars(Graph))
    watch = CaptureWatch()
    watch.install()
    yield watch
    watch.uninstall()
    assert dict(vars(Graph)) == methods


def test_a_capture_is_open_from_its_begin_to_its_end(watch):
    first, second = Graph(), Graph()
    assert not watch.is_capturing()
    assert first.capture_begin() == "begun"
    second.capture_begin()
    first.capture_end()
    assert watch.is_capturing()
    second.capture_end()
    assert not watch.is_capturing()


@pytest.mark.parametrize("part", ["capture_begin", "capture_end"])
def test_a_capture_that_failed_is_not_open(watch, part):
    graph = Graph()
    if part == "capture_end":
        graph.capture_begin()
    with pytest.raises(RuntimeError, match="planted"):
        getattr(graph, part)(fails=True)
    assert not watch.is_capturing()
