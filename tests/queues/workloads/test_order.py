"""Edges between streams: the numbers stay right when streams are slow at random."""

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from aorta.device.streams import ThreadStreams
from aorta.queues.workload import Context
from aorta.queues.workloads import find, workloads
from aorta.queues.workloads.ordering import Dataflow
from tests.queues.workloads.driver import CPU, driven

WITH_EDGES = [name for name in workloads() if name not in ("large_gemm_only", "tiny_kernel_stress")]


@pytest.mark.parametrize("name", WITH_EDGES)
def test_slow_streams_do_not_change_the_numbers(name: str):
    """Without a join between iterations, so that a stream may run an iteration ahead."""
    kind = find(name)
    num_streams = (kind.min_streams + kind.max_streams) // 2
    draw = random.Random(0)
    with driven(kind, num_streams) as ran:
        submit = ran.workload.context.span

        def slowed(stream: int, piece: str, work: Callable[[], object]) -> None:
            delay_s = draw.choice([0.0, 0.0, 0.003])
            submit(stream, piece, lambda: (time.sleep(delay_s), work()))

        ran.workload.context.span = slowed
        for output in ran.workload.outputs.values():  # type: ignore[attr-defined]
            if output.is_floating_point():
                output.fill_(float("nan"))
        for num in (1, 2):  # one alone first: a later iteration finds what an earlier one has left
            ran.iterate(num, join=False)
            check = ran.workload.validate_correctness()
            assert check.ok, check.detail


@pytest.fixture
def context():
    streams = ThreadStreams(3)

    def span(stream: int, name: str, work: Callable[[], object]) -> None:
        streams.submit(stream, work)

    yield Context(streams, CPU, "small", 0, 1, None, 0, span)
    streams.close()


def test_a_reader_follows_the_writer_and_the_next_writer_follows_the_readers(context: Context):
    flow, seen, value, gate = Dataflow(context), [], torch.zeros(1), threading.Event()

    def write(number: int) -> None:
        value.fill_(number)

    flow.put(0, "write", lambda: (gate.wait(5), write(1)), writes=["value"])
    flow.put(1, "read", lambda: seen.append(value.item()), reads=["value"])
    flow.put(2, "read late", lambda: (time.sleep(0.02), seen.append(value.item())), reads=["value"])
    flow.put(0, "write again", lambda: write(2), writes=["value"])
    flow.put(1, "read again", lambda: seen.append(value.item()), reads=["value"])
    assert seen == []
    gate.set()
    context.streams.synchronize()
    assert seen == [1, 1, 2]


def test_unrelated_work_does_not_wait(context: Context):
    flow, gate, order = Dataflow(context), threading.Event(), []
    flow.put(0, "held", lambda: (gate.wait(5), order.append("held")), writes=["a"])
    flow.put(1, "free", lambda: order.append("free"), writes=["b"])
    context.streams.record(1).synchronize()
    assert order == ["free"]
    gate.set()
    context.streams.synchronize()
    assert order == ["free", "held"]


def test_an_edge_that_another_one_implies_is_left_out(context: Context):
    flow, waits = Dataflow(context), []
    wait = context.streams.wait

    def counted(stream: int, event: object) -> None:
        waits.append(stream)
        wait(stream, event)  # type: ignore[arg-type]

    context.streams.wait = counted  # type: ignore[method-assign]
    for name in ("a", "b", "c"):
        flow.put(0, name, lambda: None, writes=[name])
    flow.put(1, "all", lambda: None, reads=["a", "b", "c"])
    flow.put(1, "all again", lambda: None, reads=["a", "b", "c"])
    assert waits == [1]
