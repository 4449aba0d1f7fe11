"""Records that no run writes are refused in one line, before any statistic is made of them."""

import json
from pathlib import Path

import pytest

from aorta.account.load.open import load_run
from aorta.account.load.rank.impossible import faults
from aorta.errors import RecordError
from aorta.records.table import LineTable
from tests.records import plain_records

EXAMPLE = Path(__file__).parents[3] / "docs" / "example" / "fsdp"


def changed(folder, change):
    """The example's run with change applied to a step whose details were kept."""
    folder.mkdir()
    for rank in range(2):
        lines = (EXAMPLE / f"rank_{rank}_metrics.jsonl").read_text().splitlines()
        record = json.loads(lines[4])
        assert record["collectives"]
        change(record)
        lines[4] = json.dumps(record)
        (folder / f"rank_{rank}_metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def of_overlap(**values):
    return lambda record: record["overlap"].update(values)


def scaled(name, factor):
    """One part of the record, or its step, without the others."""

    def change(record):
        parts = record if name == "step_ms" else record["overlap"]
        parts[name] *= factor

    return change


def of_collective(**values):
    return lambda record: record["collectives"][0].update(values)


def of_segment(**values):
    return lambda record: record["active_segments"][1].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (of_overlap(comm_ms=-5.0), "comm_ms of -5 must not be negative"),
        (of_overlap(comm_ms=1e308), "comm_ms of 1e+308 is too large for a time"),
        (of_overlap(idle_ms=-1.0), "idle_ms of -1 must not be negative"),
        (of_overlap(hidden_ms=1e6), "hidden_ms of 1e+06 is more than comm_ms"),
        (of_overlap(overlap_ratio=7.0), "overlap_ratio of 7 is more than all of comm_ms"),
        (scaled("step_ms", 0.25), "compute_ms + exposed_ms + idle_ms of 33.96"),
        (scaled("step_ms", 0.25), "is not step_ms of 8.49"),
        (scaled("step_ms", 4), "compute_ms + exposed_ms + idle_ms of 33.96"),
        (scaled("step_ms", 0), "is not step_ms of 0"),
        (scaled("exposed_ms", 10), "hidden_ms + exposed_ms of"),
        (scaled("exposed_ms", 0.1), "hidden_ms + exposed_ms of"),
        (scaled("compute_ms", 1.001), "compute_ms + exposed_ms + idle_ms of"),
        (scaled("idle_ms", 3), "compute_ms + exposed_ms + idle_ms of"),
        (of_overlap(exposed_ms=None, idle_ms=None, compute_ms=99.0), "compute_ms of 99 is more than step_ms"),
        (
            of_overlap(exposed_by_op={"all_gather": 1e6}),
            "comm_ms.all_gather of 1e+06 is more than all of comm_ms",
        ),
        (lambda record: record.update(host_ms=1e300), "host_ms of 1e+300 is too large for a time"),
        (lambda record: record.update(clock_error_us=-1.0), "clock_error_us of -1"),
        (of_collective(bytes=-1), "of -1 bytes"),
        (of_collective(bytes=-5), "of -5 bytes"),
        (of_collective(start_ms=5.0, end_ms=1.0), "ends before it begins"),
        (of_segment(active_streams=["zzz"]), "the stream 'zzz', which no record has"),
        (of_segment(start_ms=9.0, end_ms=1.0), "active_segments are not in order of time"),
        (lambda record: record["active_segments"].reverse(), "active_segments are not in order of time"),
    ],
)
def test_what_contradicts_itself_is_refused_with_its_step(tmp_path, change, says):
    with pytest.raises(RecordError, match="impossible record of global step 4") as error:
        load_run(changed(tmp_path / "run", change), "a")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_rounding_is_no_contradiction(tmp_path):
    def change(record):
        overlap = record["overlap"]
        overlap["idle_ms"] += overlap["exposed_ms"] + 1.5e-6
        overlap.update(hidden_ms=overlap["comm_ms"] + 5e-7, exposed_ms=-5e-7, overlap_ratio=1.0000004)
        overlap.update(hidden_by_op={"all_gather": overlap["comm_ms"]}, exposed_by_op={"all_gather": 0.0})

    assert load_run(changed(tmp_path / "run", change), "a").num_steps == 32


@pytest.mark.parametrize(
    "change",
    [
        of_overlap(idle_ms=None),
        of_overlap(comm_ms=None, hidden_ms=None, exposed_ms=None, idle_ms=None, overlap_ratio=None),
        lambda record: record.update(step_ms=None),
    ],
)
def test_what_is_not_known_or_estimated_breaks_no_sum(tmp_path, change):
    assert load_run(changed(tmp_path / "run", change), "a").num_steps == 32


def test_lines_without_a_clock_error_are_not_taken_apart(tmp_path, monkeypatch):
    """Which takes two thirds of a reading."""
    monkeypatch.setattr(LineTable, "chosen", None)
    records = [plain_records.step(i, clock_error_us=[2.0, None][i]) for i in range(2)]
    assert list(faults(tmp_path, LineTable(records))) == []
