"""Causes of traced steps, and aorta why on traces, on traces written by hand."""

import json

import pytest
from click.testing import CliRunner

from aorta.cli.why import why_command
from aorta.errors import AortaError
from aorta.why.causes.from_path import causes_of_steps
from aorta.why.replay.changes import parse_change
from aorta.why.replay.load import steps_of
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace
from tests.why.replay.hand_steps import device_bound, host_bound, sharded, two_ranks


def why(*arguments: object) -> str:
    result = CliRunner().invoke(why_command, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def synchronising(folder):
    """Two times a gemm, the loss read, 200 µs of the host."""
    trace = HandTrace(every=5.0)
    for _ in range(2):
        trace.kernel("gemm", trace.host + 6.0, 300.0)
        begin = trace.host
        trace.synchronise(trace.host + 310.0)
        trace.scope("aten::_local_scalar_dense", begin - 1, trace.host, "cpu_op")
        trace.think(200.0)
    trace.kernel("gemm", trace.host + 6.0, 300.0)
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def loading(folder):
    """400 µs in a DataLoader before a gemm of 300."""
    trace = HandTrace()
    trace.scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0.0, 401.0)
    trace.think(400.0)
    trace.kernel("gemm", trace.host + 6.0, 300.0)
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


def crowded(folder):
    """gemms of 100 µs, and two that take 150 beside a collective."""
    trace = HandTrace(0, world=2)
    now = 50.0
    for i in range(6):
        if i == 4:
            trace.collective("allgather", now - 1.0, 310.0)
        length = 150.0 if i >= 4 else 100.0
        trace.kernel("gemm", now, length)
        now += length + 2.0
    trace.step(0, -1.0, trace.host)
    return steps_of(trace.write(folder))[0]


class TestCauses:
    @pytest.mark.parametrize(
        ("make", "kind", "subject", "ms"),
        [
            pytest.param(two_ranks, "transfer", "exposed transfer: all_reduce", 0.1, id="transfer"),
            pytest.param(host_bound, "launch_bound", "slow kernel launches", 1.0, id="launches"),
            pytest.param(synchronising, "synchronisation", "aten::item", 0.450, id="item"),
            pytest.param(loading, "data_loading", "data loading", 0.4, id="loader"),
            pytest.param(crowded, "contention", "kernels slowed down", 0.1, id="contention"),
            pytest.param(sharded, "transfer", "exposed transfer: all_gather", 0.6, id="gathers"),
        ],
    )
    def test_the_first_is_the_planted_one(self, make, kind, subject, ms, tmp_path):
        first = causes_of_steps([make(tmp_path)])[0]
        assert (first.kind, first.source) == (kind, "trace")
        assert subject in first.subject
        assert first.ms == pytest.approx(ms, abs=0.012)

    def test_a_late_rank_is_named_with_what_it_did(self, tmp_path):
        found = {cause.kind: cause for cause in causes_of_steps([two_ranks(tmp_path)])}
        assert found["late_rank"].subject == "waiting for rank 1"
        assert found["late_rank"].ms == pytest.approx(0.04, abs=1e-3)
        assert any("gemm" in sentence for sentence in found["late_rank"].evidence)

    def test_a_step_of_compute_alone_has_none(self, tmp_path):
        assert causes_of_steps([device_bound(tmp_path)]) == []

    def test_bounds_are_replays_without_the_cause(self, tmp_path):
        step = two_ranks(tmp_path)
        found = {cause.kind: cause for cause in causes_of_steps([step])}
        for cause in (found["transfer"], found["late_rank"]):
            assert cause.bound_ms is not None
            assert cause.bound_ms == pytest.approx(0.415 - cause.ms, abs=0.002)

    @pytest.mark.parametrize("make", [two_ranks, host_bound, synchronising, loading, crowded])
    def test_the_check_is_a_command_that_works(self, make, tmp_path):
        for cause in causes_of_steps([make(tmp_path)], str(tmp_path)):
            change = cause.check.partition("--if ")[2].strip("'")
            parse_change(change)
            assert "->" in why(tmp_path, "--if", change)
            assert cause.change


class TestCommand:
    def test_shows_path_causes_and_what_they_rest_on(self, tmp_path):
        two_ranks(tmp_path)
        text = why(tmp_path)
        assert "a step takes 0.41 ms" in text
        assert "exposed transfer: all_reduce" in text
        assert "2 waits between streams" in text or "4 waits between streams" in text

    def test_says_that_nothing_is_worth_changing(self, tmp_path):
        device_bound(tmp_path)
        assert "Nothing worth changing" in why(tmp_path)

    def test_several_changes_at_once(self, tmp_path):
        two_ranks(tmp_path)
        text = why(tmp_path, "--if", "all_reduce x0.5", "--if", "rank 1 on time")
        assert "if all_reduce x0.5 and rank 1 on time" in text
        assert "0.41 ms -> 0.3" in text

    def test_json(self, tmp_path):
        two_ranks(tmp_path)
        answer = json.loads(why(tmp_path, "--json"))
        assert answer["source"] == "trace"
        assert answer["causes"][0]["kind"] == "transfer"
        assert sum(part["ms"] for part in answer["critical_path"]) == pytest.approx(answer["step_ms"])
        changed = json.loads(why(tmp_path, "--json", "--if", "all_reduce x2"))
        assert changed["predicted_ms"] - changed["step_ms"] == pytest.approx(0.1, abs=1e-6)

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            pytest.param(["--if", "all_reduc x2"], "did you mean", id="change"),
            pytest.param(["--steps", "7:9"], "hold the steps 0", id="steps"),
            pytest.param(["--steps", "x"], "FIRST:LAST", id="words"),
            pytest.param(["--steps", "9:7"], "comes before the first", id="span"),
            pytest.param(["--ranks", "0"], "needs all ranks", id="ranks"),
            pytest.param(["--warmup", "1"], "--steps chooses", id="warmup"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, arguments, says, tmp_path):
        two_ranks(tmp_path)
        with pytest.raises(AortaError, match=says):
            CliRunner().invoke(why_command, [str(tmp_path), *arguments], catch_exceptions=False)


def test_causes_name_both_sides_of_a_wait(tmp_path):
    """A collective that waits for compute is told as such by its edge, not by chance of times."""
    trace = HandTrace(0, world=2)
    trace.kernel("gemm", 20.0, 200.0)
    event = trace.record()
    trace.wait(COMM, event, COMPUTE)
    trace.collective("allreduce", 222.0, 100.0)
    trace.step(0, -1.0, trace.host)
    step = steps_of(trace.write(tmp_path))[0]
    assert step.trace.num_recorded_edges == 1
    assert step.trace.num_inferred_edges == 0


def test_advice_is_for_the_operation_at_hand(tmp_path):
    trace = HandTrace(0, world=2)
    trace.scope("DistributedDataParallel.forward", 0.0, 20.0, "cpu_op")
    trace.kernel("gemm", 10.0, 100.0)
    trace.wait(COMM, trace.record(), COMPUTE)
    trace.collective("all_to_all", 112.0, 300.0)
    trace.wait(COMPUTE, trace.record(), COMM)
    trace.kernel("gemm", 414.0, 100.0)
    trace.step(0, -1.0, trace.host)
    first = causes_of_steps([steps_of(trace.write(tmp_path))[0]])[0]
    assert first.subject == "exposed transfer: all_to_all"
    assert "bucket" not in first.change
    assert "all_to_all" in first.change
