"""What a rank on a GPU leaves that ends or is stopped without a report: how many collectives it issued."""

from pathlib import Path

import pytest
import torch

from aorta.config.structs import HangConfig
from aorta.hang.find import find, sentence
from aorta.hang.last_calls import MOST_GROUPS, CallCounts, GroupCount, read_counts, with_last_calls
from aorta.hang.report import CallState, GroupState, HangReport
from aorta.hang.watchdog import Watchdog
from aorta.record.journal import Journal
from aorta.records.files import call_counts_name
from aorta.steps.notes import CollectiveCall, Group, RecordedStep
from tests.hang.reports_by_hand import report

DEFAULT = Group("0", "default", [0, 1], "nccl")
STEP = RecordedStep(7, 7, 0, None)
OPS = ("all_reduce", "all_gather", "reduce_scatter")


def call(seq: int, group: Group = DEFAULT) -> CollectiveCall:
    issued = CollectiveCall(group, OPS[seq % 3], 64, "float32", is_async=False)
    issued.seq = seq
    return issued


def ahead(num_seen: int) -> HangReport:
    """Of rank 0, whose device tells of whole steps alone: it has issued all of step 7, and waits."""
    calls = [
        CallState(
            seq=seq, op=OPS[seq % 3], bytes=64, dtype="float32", step=seq // 3,
            started=True if seq < 21 else None, finished=True if seq < 21 else None, age_s=100.0 - seq,
        )
        for seq in range(num_seen)
    ]  # fmt: skip
    group = GroupState(key="0", name="default", ranks=[0, 1], backend="nccl", num_seen=num_seen, calls=calls)
    return report(0, group, num_steps=8)


@pytest.mark.parametrize(("num_issued", "op"), [(21, "all_reduce"), (22, "all_gather")])
def test_the_first_call_that_a_stopped_rank_has_not_issued_is_named(
    tmp_path: Path, num_issued: int, op: str
) -> None:
    counts = CallCounts(tmp_path / call_counts_name(1))
    for seq in range(num_issued):
        counts.note(STEP, call(seq))
    finding = find(with_last_calls(tmp_path, [ahead(24)]))
    assert (finding.kind, finding.ranks, finding.silent) == ("absent", [1], [1])
    text = sentence(finding)
    assert f"rank 1 has not come to {op} of 64 bytes float32 (#{num_issued} of group default, step 7)" in text
    assert "no report from rank 1" in text
    assert "if rank 1 was killed" in text


def test_without_a_count_the_call_is_not_named(tmp_path: Path) -> None:
    assert find(with_last_calls(tmp_path, [ahead(24)])).kind == "nobody_waits"


def test_the_file_counts_by_group_and_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / call_counts_name(0)
    counts = CallCounts(path)
    size = path.stat().st_size
    for number in range(3 * MOST_GROUPS):
        counts.note(STEP, call(number, Group(f"group {number}", "pair", [0, 1], "nccl")))
    counts.note(STEP, call(9, Group("x" * 500, "long", [0, 1], "nccl")))
    assert path.stat().st_size == size
    assert len(counts._places) <= 2 * MOST_GROUPS
    assert read_counts(path) == {
        f"group {number}": GroupCount(number + 1, 7) for number in range(MOST_GROUPS)
    }
    counts.remove()
    assert read_counts(path) == {}


@pytest.mark.parametrize("content", [b"", b"\xff" * 1000, b"\0" * 4000, b"\1" * 127])
def test_a_damaged_file_counts_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / call_counts_name(1)).write_bytes(content)
    reports = [ahead(24)]
    assert with_last_calls(tmp_path, reports) == reports


class RecorderWithJournal:
    def __init__(self) -> None:
        self.journal = Journal()


def test_on_a_gpu_the_watchdog_counts_and_takes_the_file_away(tmp_path: Path) -> None:
    recorder = RecorderWithJournal()
    watchdog = Watchdog(
        HangConfig(enabled=True),
        tmp_path,
        0,
        2,
        recorder=recorder,
        store=None,
        device=torch.device("cuda", 0),
    )
    watchdog._keep_last_calls()
    recorder.journal.current = STEP
    for _ in range(3):
        recorder.journal.add_call(CollectiveCall(DEFAULT, "all_reduce", 64, "float32", is_async=False))
    assert read_counts(tmp_path / call_counts_name(0)) == {"0": GroupCount(3, 7)}
    watchdog.__exit__(None, None, None)
    assert not (tmp_path / call_counts_name(0)).exists()
