"""What a rank leaves that ends without a report."""

from pathlib import Path

import pytest

from aorta.hang.find import find, sentence
from aorta.hang.last_calls import NUM_SLOTS, LastCalls, with_last_calls
from aorta.hang.report import CallState, GroupState, HangReport
from aorta.records.files import last_calls_name
from aorta.steps.notes import CollectiveCall, Group, RecordedStep
from tests.hang.reports_by_hand import report

DEFAULT = Group("0", "default", [0, 1, 2], "gloo")


def note(calls: LastCalls, step: int, seq: int, num_bytes: int) -> None:
    call = CollectiveCall(DEFAULT, "all_reduce", num_bytes, "float32", is_async=False)
    call.seq = seq
    calls.note(RecordedStep(step, step, 0, None), call)


def waiting(rank: int, num_bytes: int) -> HangReport:
    call = CallState(
        seq=7,
        op="all_reduce",
        bytes=num_bytes,
        dtype="float32",
        step=7,
        started=True,
        finished=False,
        age_s=1.0,
    )
    group = GroupState(key="0", name="default", ranks=[0, 1, 2], backend="gloo", num_seen=8, calls=[call])
    return report(rank, group, world_size=3, num_steps=8)


def test_a_rank_that_was_aborted_is_compared_by_the_calls_that_it_noted(tmp_path: Path) -> None:
    """gloo aborts rank 0, whose tensor is smaller than what rank 1 sends: rank 1 is to blame."""
    calls = LastCalls(tmp_path / last_calls_name(0))
    for seq in range(8):
        note(calls, step=seq, seq=seq, num_bytes=64)
    found = find(with_last_calls(tmp_path, [waiting(1, 4096), waiting(2, 64)]))
    assert (found.kind, found.ranks, found.silent) == ("mismatch", [1], [0])
    assert "rank 1 issued all_reduce of 4096 bytes" in sentence(found)
    assert "no report from rank 0" in sentence(found)


def test_a_rank_that_was_killed_before_a_call_has_not_come_to_it(tmp_path: Path) -> None:
    calls = LastCalls(tmp_path / last_calls_name(0))
    for seq in range(7):
        note(calls, step=seq, seq=seq, num_bytes=64)
    found = find(with_last_calls(tmp_path, [waiting(1, 64), waiting(2, 64)]))
    assert (found.kind, found.ranks) == ("absent", [0])
    assert "#7 of group default" in sentence(found)


def test_the_file_holds_the_latest_and_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / last_calls_name(0)
    calls = LastCalls(path)
    size = path.stat().st_size
    for seq in range(3 * NUM_SLOTS):
        note(calls, step=seq, seq=seq, num_bytes=64)
    assert path.stat().st_size == size
    kept, *_ = with_last_calls(tmp_path, [waiting(1, 64), waiting(2, 64)])
    assert kept.groups is not None
    assert [call.seq for call in kept.groups[0].calls] == list(range(2 * NUM_SLOTS, 3 * NUM_SLOTS))
    calls.remove()
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000, b"[1,2]" + b" " * 155, b"{" * 4000])
def test_a_damaged_file_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / last_calls_name(0)).write_bytes(content)
    reports = [waiting(1, 64), waiting(2, 64)]
    assert with_last_calls(tmp_path, reports) == reports
