"""What-ifs that a report shows, on traces written by hand."""

import json

import pytest

from aorta.errors import ReplayError, TraceError
from aorta.page.html import page
from aorta.page.write import make_report
from aorta.why.causes import whatifs
from aorta.why.causes.rank import causes_of
from aorta.why.replay.changes import parse_change
from aorta.why.replay.load import steps_of
from aorta.why.replay.whatif import predict
from tests.why.replay.hand_steps import host_bound, sharded, two_ranks


def test_the_largest_gain_comes_first(tmp_path):
    lines = whatifs.best([sharded(tmp_path)])
    gains = [line.step_ms - line.predicted_ms for line in lines]
    assert gains == sorted(gains, reverse=True)
    assert lines[0].change in ("prefetch +1", "all_gather x0.5")
    for line in lines:
        assert line.interval_ms[0] <= line.predicted_ms <= line.interval_ms[1]


def test_what_is_not_on_the_critical_path_is_not_suggested(tmp_path):
    assert not any(
        "all_gather" in text or "on time" in text for text in whatifs.suggested([host_bound(tmp_path)])
    )


def test_a_late_rank_is_asked_to_be_on_time(tmp_path):
    assert "rank 1 on time" in whatifs.suggested([two_ranks(tmp_path)])


@pytest.mark.heavy
def test_the_page_of_traces_holds_them_as_a_table(tmp_path):
    two_ranks(tmp_path)
    report = make_report([tmp_path], ["run"], explain=causes_of)
    assert [line["change"] for line in report.summary["datasets"]["run"]["whatifs"]]
    assert "<code>rank 1 on time</code>" in page(report)


@pytest.mark.heavy
def test_traces_too_large_to_replay_in_a_report_are_said_to_be(tmp_path, monkeypatch):
    two_ranks(tmp_path)
    monkeypatch.setattr(whatifs, "MOST_BYTES", 1)
    report = make_report([tmp_path], ["run"], explain=causes_of)
    assert "are not replayed for a report" in page(report)


def test_a_trace_of_another_time_than_the_run_is_not_replayed(tmp_path):
    two_ranks(tmp_path)
    assert steps_of(tmp_path, within_unix_ns=(10**12, 2 * 10**12))
    with pytest.raises(ReplayError, match=r"is of another time than the run's steps"):
        steps_of(tmp_path, within_unix_ns=(10**18, 2 * 10**18))


@pytest.mark.heavy
def test_why_traces_could_not_be_replayed_is_beside_the_numbers(tmp_path, monkeypatch):
    def torn(*args, **options):
        raise TraceError("rank0.json is torn")

    two_ranks(tmp_path)
    monkeypatch.setattr("aorta.why.replay.load.steps_of", torn)
    dataset = make_report([tmp_path], ["run"], explain=causes_of).summary["datasets"]["run"]
    assert (dataset["whatifs"], dataset["notes"][-1]) == ([], "no what-ifs: rank0.json is torn")


def test_steps_without_time_are_not_replayed(tmp_path):
    """Three steps whose marks and kernels all have one time, as in a file with a broken clock."""
    mark = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": -1, "dur": 999}
    launch = mark | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 2}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": -1, "dur": 100}
    events = []
    for step in range(3):
        stream = {"correlation": step, "stream": 7, "device": 0}
        events += [mark | {"name": f"ProfilerStep#{step}"}, launch | {"args": {"correlation": step}}]
        events.append(kernel | {"args": stream})
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ReplayError, match="takes 0 ms: there is no time to replay"):
        predict(steps_of(path), [parse_change("graphs")])
