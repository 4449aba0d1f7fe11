"""Records of a run beside captures of the same steps, in the formats of rocprofv3 and nsys.

The capture is that of tests/traces/trace_writers.py: step 1 is 0-100 µs, with a GEMM 30-60 and NCCL 50-90.
"""

from pathlib import Path

import pytest

from aorta.account.load.open import load_run
from aorta.cli import main
from aorta.merge.command import merge
from aorta.records.files import steps_name
from aorta.records.reader import read_run, read_steps
from aorta.records.writer import LineWriter, write_json
from aorta.steps.event_steps import EventSteps
from aorta.steps.notes import ResolverSettings
from tests.records.plain_records import run as plain_run
from tests.steps.event_marks import Made
from tests.traces.trace_writers import NSYS_EPOCH_NS, START_NS, write_csv_set, write_nsys, write_rocpd

STEP_MS = 0.1
UNIX_MINUS_BOOT_NS = 1_790_000_000_000_000_000


def write_run(folder: Path, start_unix_ns: int, anchor_ns: int = UNIX_MINUS_BOOT_NS) -> None:
    """Steps 1 and 2 of rank 0 of 1; the all-reduce is recorded from 40 to 90 µs.

    anchor_ns: Unix time minus boot time, as run.json tells it.
    """
    settings = ResolverSettings(
        rank=0,
        world_size=1,
        on_device=True,
        clock_lower_ns=0,
        clock_upper_ns=0,
        unix_minus_monotonic_ns=start_unix_ns,
    )
    event_steps = EventSteps(settings)
    with LineWriter.create(folder / steps_name(0)) as writer:
        for number in (1, 2):
            step = Made(STEP_MS, STEP_MS, number=number, origin=STEP_MS * (number - 1))
            if number == 1:
                step.call("all_reduce", 0.04, 0.09, is_async=True)
            writer.write(event_steps.resolve(step.noted()))
    anchor = {"unix_ns": anchor_ns + 7, "boottime_ns": 7, "monotonic_ns": 0, "width_ns": 0}
    write_json(folder / "run.json", plain_run(clock_anchors=[anchor], coverage={"rank": 0}))
    (folder / "rank0").mkdir()


def expect_the_step(folder: Path, source: str) -> None:
    (line,) = (record for record in read_steps(folder / steps_name(0)) if record.source == source)
    assert line.global_step == 1
    numbers = line.overlap
    assert numbers.comm_ms == pytest.approx(0.040)
    assert numbers.compute_ms == pytest.approx(0.030)
    assert numbers.hidden_ms == pytest.approx(0.010)
    assert numbers.exposed_ms == pytest.approx(0.030)
    assert line.collectives is not None
    (call,) = line.collectives
    assert (call.op, call.start_ms, call.end_ms) == (
        "all_reduce",
        pytest.approx(0.050),
        pytest.approx(0.090),
    )
    run = load_run(folder, "run")
    assert (run.source, list(run.other_sources)) == ("events", [source])


def test_rocprofv3s_boot_clock_is_brought_to_the_records(tmp_path: Path) -> None:
    write_run(tmp_path, START_NS + UNIX_MINUS_BOOT_NS)
    write_rocpd(tmp_path / "rank0" / "rank0_908_results.db")
    (merged,) = merge(tmp_path)
    assert (merged.source, merged.num_added, merged.check.num_matched) == ("rocprofv3", 1, 1)
    assert merged.notes == ["boot clock brought to Unix time by the anchors of run.json"]
    expect_the_step(tmp_path, "rocprofv3")
    coverage = read_run(tmp_path).coverage
    assert coverage["rank"] == 0  # what was there stays
    assert coverage["kernel_windows"][0]["steps"] == [1]


def test_a_rank_of_another_machine_is_placed_by_its_steps(tmp_path: Path) -> None:
    """The anchors are of a machine that has been up an hour longer."""
    hour_ns = 3600 * 10**9
    write_run(tmp_path, START_NS + UNIX_MINUS_BOOT_NS, UNIX_MINUS_BOOT_NS - hour_ns)
    write_csv_set(tmp_path / "rank0")
    (merged,) = merge(tmp_path)
    assert merged.notes[1] == "moved by 3600000.000 ms onto the steps of the records"
    expect_the_step(tmp_path, "rocprofv3")


def test_nsys_is_on_the_unix_clock(tmp_path: Path) -> None:
    write_run(tmp_path, START_NS + NSYS_EPOCH_NS)
    write_nsys(tmp_path / "rank0" / "rank0.sqlite")
    (merged,) = merge(tmp_path)
    assert merged.notes == []
    expect_the_step(tmp_path, "nsys")


def status_of_merge(folder: Path) -> int | str | None:
    with pytest.raises(SystemExit) as ending:
        main(["merge", str(folder)])
    return ending.value.code


def test_files_of_processes_without_device_work_are_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path, START_NS + UNIX_MINUS_BOOT_NS)
    write_rocpd(tmp_path / "rank0" / "rank0_908_results.db")
    (tmp_path / "rank0" / "rank0_909_results.db").touch()
    assert status_of_merge(tmp_path) == 0
    printed = capsys.readouterr()
    assert printed.err == (
        f"merge: rank 0: rank0_909_results.db: {tmp_path}/rank0/rank0_909_results.db is empty\n"
    )
    assert printed.out.splitlines()[1].split() == [
        "0",
        "rocprofv3",
        "1",
        "1",
        "1",
        "0",
        "0",
        "rank0_908_results.db",
    ]
    before = (tmp_path / steps_name(0)).read_bytes()
    assert status_of_merge(tmp_path) == 0
    assert (tmp_path / steps_name(0)).read_bytes() == before


def test_a_trace_of_another_time_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_run(tmp_path, START_NS)
    write_nsys(tmp_path / "rank0" / "rank0.sqlite", leave_out=["NVTX_EVENTS"])  # no steps to go by
    assert status_of_merge(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no whole step of the run (it spans 1790005000.000 to 1790005000.000 s" in line


@pytest.mark.parametrize("has_run", [True, False])
def test_nothing_to_merge_is_one_line(has_run: bool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if has_run:
        write_run(tmp_path, START_NS)
    assert status_of_merge(tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ("no trace beside the records" if has_run else "cannot read") in line
