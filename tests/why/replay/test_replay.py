"""The graph, its replay and its critical path, on traces whose numbers are worked out by hand."""

from pathlib import Path

import pytest

from aorta.errors import TraceError
from aorta.why.replay.changes import parse_change
from aorta.why.replay.graph import StepGraph
from aorta.why.replay.load import steps_of
from aorta.why.replay.path import critical_path, summed
from aorta.why.replay.run import replay
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace
from tests.why.replay.hand_steps import broadcasting, device_bound, host_bound, replayed_ms, two_ranks


def kinds(step: StepGraph) -> dict[str, float]:
    """Milliseconds of the critical path by kind."""
    found: dict[str, float] = {}
    for part in critical_path(replay(step)):
        found[part.kind] = found.get(part.kind, 0.0) + part.ms
    return found


class TestReplay:
    @pytest.mark.parametrize("make", [device_bound, host_bound, two_ranks, broadcasting])
    def test_gives_the_measured_step_back(self, make, tmp_path):
        step = make(tmp_path)
        replayed = replay(step)
        for end in step.ends:
            assert replayed.step_ms(end.rank) == pytest.approx(step.measured_ms(end.rank), abs=1e-6)

    @pytest.mark.parametrize("make", [device_bound, host_bound, two_ranks])
    def test_parts_of_the_path_add_up_to_the_step_without_gap(self, make, tmp_path):
        replayed = replay(make(tmp_path))
        parts = critical_path(replayed)
        assert sum(part.ms for part in parts) == pytest.approx(replayed.slowest_ms, rel=1e-9)
        for before, after in zip(parts, parts[1:], strict=False):
            assert before.end_ns == pytest.approx(after.start_ns, abs=1e-3)

    def test_does_not_read_measured_times(self, tmp_path):
        step = two_ranks(tmp_path)
        before = replayed_ms(step)
        step.trace.nodes.start_ns[:] = [0.0] * len(step.trace.nodes)
        step.trace.nodes.end_ns[:] = [0.0] * len(step.trace.nodes)
        assert replayed_ms(step) == before

    def test_a_device_bound_step_is_compute_from_end_to_end(self, tmp_path):
        found = kinds(device_bound(tmp_path))
        assert found["compute"] == pytest.approx(0.402, abs=1e-3)  # 100 + 2 + 300
        assert sum(found.values()) == pytest.approx(0.413, abs=1e-3)  # from -1 to 412

    def test_a_host_bound_step_names_the_program(self, tmp_path):
        parts = summed(critical_path(replay(host_bound(tmp_path))))
        assert parts[0].kind == "launch_bound"
        assert sum(p.ms for p in parts if p.kind == "launch_bound") == pytest.approx(1.001, abs=1e-6)
        assert {"aten::op0", "aten::op1"} <= {p.subject for p in parts}

    def test_waiting_names_the_late_rank_and_what_it_did(self, tmp_path):
        parts = critical_path(replay(two_ranks(tmp_path)))
        late = [part for part in parts if part.kind == "late_rank"]
        assert [part.subject for part in late] == ["rank 1"]
        assert late[0].ms == pytest.approx(0.040, abs=1e-6)
        assert "gemm" in late[0].evidence

    def test_transfer_is_what_is_left_after_the_last_rank_came(self, tmp_path):
        parts = critical_path(replay(two_ranks(tmp_path)))
        transfer = [part for part in parts if part.kind == "transfer"]
        assert [part.subject for part in transfer] == ["all_reduce"]
        assert transfer[0].ms == pytest.approx(0.100, abs=1e-6)

    def test_the_host_waits_and_then_the_device_for_the_host(self, tmp_path):
        trace = HandTrace(every=10.0)
        trace.kernel("gemm", 10.0, 500.0)
        trace.scope("aten::_local_scalar_dense", trace.host - 1, 530.0, "cpu_op")
        trace.synchronise(520.0)
        trace.think(100.0)
        trace.kernel("gemm", trace.host + 6.0, 300.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        rows = summed(critical_path(replay(step)))
        parts = {part.kind: part for part in rows}
        # Until the call returns, 10 µs; 110 µs to the next launch; 6 µs to its kernel.
        assert parts["synchronisation"].ms == pytest.approx(0.126, abs=1e-6)
        assert "aten::item" in parts["synchronisation"].subject
        assert sum(part.ms for part in rows) == pytest.approx(0.937, abs=1e-6)
        # Without the wait the second gemm follows the first.
        assert replayed_ms(step, "no sync aten::item") == pytest.approx(0.811, abs=0.005)


class TestEdges:
    def waiting(self, recorded: bool, folder: Path) -> StepGraph:
        """A kernel that waits for a collective, which ends long before its stream is ready anyway."""
        trace = HandTrace(0, 2)
        trace.collective("allgather", 10.0, 50.0)
        event = trace.record()
        trace.kernel("gemm", 15.0, 200.0)
        if recorded:
            trace.wait(COMPUTE, event, COMM)
        trace.kernel("gemm", 217.0, 100.0)
        trace.step(0, -1.0, trace.host)
        return steps_of(trace.write(folder))[0]

    def test_a_recorded_wait_binds_once_the_collective_is_slow(self, tmp_path):
        step = self.waiting(True, tmp_path)
        assert step.trace.num_recorded_edges == 1
        assert replayed_ms(step, "all_gather x2") == pytest.approx(replayed_ms(step), abs=1e-6)
        # 10 + 500, then at most 157 µs of lag as measured, then 100.
        assert replayed_ms(step, "all_gather x10") > replayed_ms(step) + 0.29

    def test_nothing_waits_where_nothing_was_recorded(self, tmp_path):
        step = self.waiting(False, tmp_path)
        assert step.trace.num_recorded_edges == 0
        assert replayed_ms(step, "all_gather x4") == pytest.approx(replayed_ms(step), abs=1e-6)

    def test_a_stream_without_kernels_passes_an_order_on(self, tmp_path):
        trace = HandTrace(0, 2)
        trace.kernel("gemm", 10.0, 20.0)
        trace.collective("allgather", 40.0, 400.0)
        event = trace.record()  # on a stream that Kineto leaves out
        trace.wait(COMPUTE, event, 99)
        trace.kernel("gemm", 442.0, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert step.trace.num_inferred_edges == 1
        assert replayed_ms(step, "all_gather x0.5") == pytest.approx(replayed_ms(step) - 0.2, abs=1e-6)

    def test_a_start_just_after_communication_is_taken_for_a_wait_and_counted(self, tmp_path):
        trace = HandTrace(0, 2)
        trace.collective("allgather", 20.0, 400.0)
        trace.call("cudaStreamWaitEvent", 1.0)  # the trace does not say whose
        trace.kernel("gemm", 423.0, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert (step.trace.num_recorded_edges, step.trace.num_inferred_edges) == (0, 1)
        assert any("inferred" in note for note in step.trace.notes)
        assert replayed_ms(step, "all_gather x0.5") == pytest.approx(replayed_ms(step) - 0.2, abs=1e-6)

    def test_a_delay_that_nothing_explains_is_told(self, tmp_path):
        trace = HandTrace()
        trace.kernel("gemm", 10.0, 20.0)
        trace.kernel("gemm", 530.0, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert list(step.trace.unexplained.values()) == [pytest.approx(499_000, abs=1_000)]
        assert kinds(step)["other"] == pytest.approx(0.5, abs=0.002)
        assert replayed_ms(step, "no unexplained delays") == pytest.approx(0.132, abs=0.002)

    def test_work_that_waits_for_room_beside_a_kernel_is_contention(self, tmp_path):
        trace = HandTrace(0, 2)
        trace.kernel("gemm", 10.0, 1000.0)
        event = trace.record()
        trace.kernel("gemm", 1012.0, 1000.0)
        trace.wait(COMM, event, COMPUTE)
        trace.collective("allgather", 1962.0, 500.0)
        event = trace.record()
        trace.wait(COMPUTE, event, COMM)
        trace.kernel("gemm", 2464.0, 100.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert kinds(step)["contention"] == pytest.approx(0.952, abs=0.01)
        assert replayed_ms(step, "no contention") == pytest.approx(2.565 - 0.448, abs=0.01)


class TestPipeline:
    def stages(self, folder: Path) -> StepGraph:
        """Stage 0 computes 300 µs and sends; stage 1 has nothing to do before it has received."""
        for rank in (0, 1):
            trace = HandTrace(rank, world=2)
            if rank == 0:
                trace.kernel("gemm", 20.0, 300.0)
                event = trace.record()
                trace.wait(COMM, event, COMPUTE)
            start = 322.0 if rank == 0 else 20.0
            trace.collective("send" if rank == 0 else "recv", start, 372.0 - start)
            event = trace.record()
            if rank == 1:
                trace.wait(COMPUTE, event, COMM)
                trace.kernel("gemm", 374.0, 200.0)
            trace.step(0, -1.0, trace.host)
            trace.write(folder)
        return steps_of(folder)[0]

    def test_a_receiver_waits_for_its_sender(self, tmp_path):
        step = self.stages(tmp_path)
        replayed = replay(step, [parse_change("kernel gemm x2")])
        assert replayed.step_ms(1) == pytest.approx(replay(step).step_ms(1) + 0.5, abs=1e-6)
        assert kinds(step)["bubble"] == pytest.approx(0.302, abs=0.001)

    def test_a_bubble_is_named_where_the_sender_was_not_traced(self, tmp_path):
        self.stages(tmp_path)
        step = steps_of(tmp_path / "rank1.json")[0]
        assert kinds(step)["bubble"] == pytest.approx(0.352, abs=0.001)


class TestTraces:
    def test_threads_that_take_turns_are_one_program(self, tmp_path):
        trace = HandTrace()
        trace.kernel("gemm", 10.0, 20.0)
        for event in trace.events[-2:]:
            event["tid"] = 2 if event["cat"] == "cuda_runtime" else event["tid"]
        trace.think(100.0)
        trace.kernel("gemm", trace.host + 5.0, 20.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert replayed_ms(step, "host x3") > replayed_ms(step) + 0.19

    def test_kernels_alone_give_a_graph_of_the_device_that_says_so(self, tmp_path):
        trace = HandTrace()
        trace.kernel("gemm", 10.0, 20.0)
        trace.kernel("gemm", 32.0, 100.0)
        trace.events = [event for event in trace.events if event["cat"] == "kernel"]
        step = steps_of(trace.write(tmp_path))[0]
        assert any("no host calls" in note for note in step.trace.notes)
        assert any("the whole trace is one step" in note for note in step.trace.notes)
        assert replayed_ms(step, "gemm x2") == pytest.approx(0.242, abs=1e-6)

    def test_one_rank_of_several_says_what_its_collectives_hold(self, tmp_path):
        trace = HandTrace(0, 2)
        trace.collective("allgather", 10.0, 50.0)
        trace.step(0, -1.0, trace.host)
        step = steps_of(trace.write(tmp_path))[0]
        assert any("1 of 2 ranks" in note for note in step.trace.notes)

    def test_damage_is_one_line(self, tmp_path):
        path = tmp_path / "rank0.json"
        path.write_text('{"traceEvents": [{"ph": "X"')
        with pytest.raises(TraceError):
            steps_of(path)

    def test_categories_of_2021_are_those_of_today(self, tmp_path):
        today = device_bound(tmp_path)
        path = tmp_path / "rank0.json"
        text = path.read_text()
        for name, earlier in (
            ("kernel", "Kernel"),
            ("cuda_runtime", "Runtime"),
            ("user_annotation", "UserAnnotation"),
        ):
            text = text.replace(f'"cat": "{name}"', f'"cat": "{earlier}"')
        assert '"cat": "kernel"' not in text
        path.write_text(text)
        assert steps_of(path)[0].ends == today.ends

    def test_no_device_work_with_a_time_is_one_line(self, tmp_path):
        device_bound(tmp_path)
        path = tmp_path / "rank0.json"
        path.write_text(path.read_text().replace('"dur"', '"duration"'))
        with pytest.raises(TraceError):
            steps_of(path)

    def test_a_folder_of_records_is_no_trace(self, tmp_path):
        (tmp_path / "rank_0_metrics.jsonl").write_text("")
        with pytest.raises(TraceError):
            steps_of(tmp_path)
