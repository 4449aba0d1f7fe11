"""What ran, as a trace, beside the program that it came from."""

import gzip
import json

import pytest

from aorta.errors import AortaError
from aorta.programs.language.emit import COMMS, ORDERS
from aorta.programs.language.expr import HostProgramError
from aorta.programs.language.ir import Communicate, Gemm, Record, Wait, WaitWork
from aorta.programs.lint.recorded import lint_file
from tests.programs.named import emit_named

NCCL, GEMM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "nvjet_tst_128x256_64x4"


class Trace:
    """Writes what CUPTI would record of a program: kernels and waits with the ids of the calls."""

    def __init__(self):
        self.events, self.call = [], 100

    def add(self, category, name, stream, **args):
        self.call += 1
        arguments = {"stream": stream, "correlation": self.call, **args}
        event = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "args": arguments}
        self.events.append(event | {"ts": 10.0 * self.call, "dur": 5.0})

    def record(self, stream):
        self.call += 1
        return stream, self.call

    def wait(self, stream, recorded):
        self.add(
            "cuda_sync",
            "Stream Wait Event",
            stream,
            wait_on_stream=recorded[0],
            wait_on_cuda_event_record_corr_id=recorded[1],
            wait_on_cuda_event_id=7,
        )

    def run(self, program):
        """One run of a program, as torch and NCCL issue it."""
        ids: dict[str, int] = {}
        stream_id = lambda name: ids.setdefault(name, 7 + len(ids))  # noqa: E731
        events, works = {}, {}
        for step in program.unroll():
            here = stream_id(step.stream)
            match step.op:
                case Record(event=event, stream=stream):
                    events[event] = self.record(here if stream is None else stream_id(str(stream)))
                case Wait(event=event):
                    self.wait(here, events[event])
                case Communicate(work=work, lane=lane) if work is not None:
                    self.wait(stream_id(str(lane)), self.record(here))
                    self.add("kernel", NCCL, stream_id(str(lane)))
                    works[work] = self.record(stream_id(str(lane)))
                case Communicate():
                    self.add("kernel", NCCL, here)
                case WaitWork(work=work):
                    self.wait(here, works[work])
                case Gemm():
                    self.add("kernel", GEMM, here)
        return self

    def write(self, path):
        # A trace is in no particular order.
        data = json.dumps({"traceEvents": self.events[::-1]}).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("given", [{}, {"op": "gemm_rs"}, {"comm": COMMS[1]}, {"asynchronous": False}])
def test_a_trace_of_a_program_is_ordered_as_the_program_says(order, given, tmp_path):
    program = emit_named(order, num_tiles=4, num_streams=2, **given)
    path = Trace().run(program).run(program).write(tmp_path / "trace.json.gz")
    found = lint_file(path, program)
    assert (found.num_repetitions, found.unexpected, found.absent, found.warnings) == (2, [], [], [])


def test_a_factorized_run_differs_from_the_developed_program_by_its_false_edges(tmp_path):
    path = Trace().run(emit_named("factorized", num_tiles=4)).write(tmp_path / "trace.json")
    found = lint_file(path, emit_named("developed", num_tiles=4))
    assert [(d.before.partition(",")[0], d.after.partition(",")[0]) for d in found.unexpected] == [
        (f"gemm(G[{i}]", f"gathered[{i + 1}] = all_gather(A[{i + 1}]") for i in range(3)
    ]
    assert [link.text for link in found.unexpected[0].chain][1:-1] == ["record", "wait"] * 3
    assert found.absent == []
    developed = Trace().run(emit_named("developed", num_tiles=4)).write(tmp_path / "developed.json")
    lacking = lint_file(developed, emit_named("factorized", num_tiles=4)).absent
    assert ("gemm(G[0]", "gathered[1] = all_gather(A[1]") in [
        (d.before.partition(",")[0], d.after.partition(",")[0]) for d in lacking
    ]


def test_communication_that_no_compute_can_overlap_is_named(tmp_path):
    factorized = Trace().run(emit_named("factorized", num_tiles=4)).write(tmp_path / "f.json")
    developed = Trace().run(emit_named("developed", num_tiles=4)).write(tmp_path / "d.json")
    found = lint_file(factorized)
    assert [pinned.number for pinned in found.pinned] == [0, 1, 2, 3]
    assert found.pinned[1].waits_for.before == found.pinned[1].holds_up.after == GEMM
    # All compute needs the first all-gather whatever the order.
    assert [pinned.number for pinned in lint_file(developed).pinned] == [0]


def test_a_host_that_waits_orders_everything_it_issues_later(tmp_path):
    trace = Trace()
    trace.add("kernel", GEMM, 7)
    trace.add("cuda_sync", "Context Sync", -1)
    trace.add("kernel", NCCL, 8)
    assert [p.number for p in lint_file(trace.write(tmp_path / "a.json")).pinned] == [0]
    other = Trace()
    other.add("kernel", GEMM, 7)
    other.add("cuda_sync", "Stream Sync", 9)
    other.add("kernel", NCCL, 8)
    assert lint_file(other.write(tmp_path / "b.json")).pinned == []


def test_a_wait_for_what_was_recorded_before_the_trace_is_told(tmp_path):
    trace = Trace()
    trace.add("kernel", GEMM, 7)
    trace.wait(7, (-1, -1))
    found = lint_file(trace.write(tmp_path / "t.json"))
    assert found.warnings[0].startswith("1 waits name no record of this trace")


def test_a_trace_without_synchronisation_says_what_to_record(tmp_path):
    trace = Trace()
    trace.add("kernel", GEMM, 7)
    with pytest.raises(
        HostProgramError, match="no synchronisation events: record with profiling.sync_events"
    ):
        lint_file(trace.write(tmp_path / "t.json"))


def test_another_number_of_operations_is_not_compared(tmp_path):
    path = Trace().run(emit_named("developed", num_tiles=4)).write(tmp_path / "t.json")
    with pytest.raises(
        HostProgramError, match="4 communications and 4 matrix multiplies, the program 8 and 8"
    ):
        lint_file(path, emit_named("developed", num_tiles=8))


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"traceEvents": 3}', b"\x1f\x8bxx", b'{"traceEvents": []}']
)
def test_what_is_no_trace_is_one_line(data, tmp_path):
    path = tmp_path / "trace.json"
    path.write_bytes(data)
    with pytest.raises(AortaError, match="trace.json"):
        lint_file(path)


def test_odd_events_are_passed_over(tmp_path):
    trace = Trace().run(emit_named("developed", num_tiles=2))
    trace.events += [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": GEMM, "args": None},
        {"ph": "X", "cat": "kernel", "name": GEMM, "args": {"correlation": "none"}},
        {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event"},
    ]
    found = lint_file(trace.write(tmp_path / "t.json"), emit_named("developed", num_tiles=2))
    assert not found.is_different


@pytest.mark.heavy
def test_a_trace_of_any_length_is_linted_like_a_short_one(tmp_path):
    program = emit_named("developed", num_tiles=100, num_streams=4)
    trace = Trace()
    for _ in range(105):
        trace.run(program)
    found = lint_file(trace.write(tmp_path / "t.json"))
    assert (found.num_operations, found.num_communications) == (21_000, 10_500)
    # The first all-gather of each run comes after all compute of the run before and before all of its own.
    assert [pinned.number for pinned in found.pinned] == list(range(0, 10_500, 100))
