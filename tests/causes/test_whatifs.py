"""What-ifs that a report shows, on traces written by hand."""

import pytest

from aorta.causes import whatifs
from aorta.causes.lines import causes_lines
from aorta.report.page import page
from aorta.report.write import make_report
from tests.replay.hand_steps import host_bound, sharded, two_ranks


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
    report = make_report([tmp_path], ["run"], explain=causes_lines)
    assert [line["change"] for line in report.summary["datasets"]["run"]["whatifs"]]
    assert "<code>rank 1 on time</code>" in page(report)


@pytest.mark.heavy
def test_traces_too_large_to_replay_in_a_report_are_said_to_be(tmp_path, monkeypatch):
    two_ranks(tmp_path)
    monkeypatch.setattr(whatifs, "MOST_BYTES", 1)
    report = make_report([tmp_path], ["run"], explain=causes_lines)
    assert "are not replayed for a report" in page(report)
