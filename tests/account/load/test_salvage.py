"""What is left of a damaged run is read, with its coverage first; strict refuses it."""

import shutil
from pathlib import Path

import msgspec
import pytest

from aorta.account.load.open import load_run
from aorta.errors import AortaError
from aorta.records.files import state_name
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import AttemptRecord, Ending
from aorta.records.state import ProcessState, StateFile, Tally
from aorta.records.writer import LineWriter, RunFolder, write_json
from aorta.traces.steps import Reading
from tests.records.run_folders import run_record

EXAMPLE = Path(__file__).parents[3] / "docs" / "example" / "ddp"
LEFT = Reading(strict=False)


@pytest.fixture
def folder(tmp_path):
    """Two ranks of 32 steps, sealed as a recorder writes them."""
    run = read_run(EXAMPLE)
    run.run_id = "one"
    for rank in range(2):
        with RunFolder(tmp_path / "run", rank) as empty:
            if rank == 0:
                empty.write_run(run)
        name = f"rank_{rank}_metrics.jsonl"
        with LineWriter.append(tmp_path / "run" / name) as writer:
            for record in read_steps(EXAMPLE / name, []):
                writer.write(msgspec.structs.replace(record, schema=2, run_id="one"))
    return tmp_path / "run"


def change_lines(path, change):
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def flipped(lines, number):
    """A bit of the step's time, which the checksum tells."""
    at = lines[number].index(b'"step_ms":') + len(b'"step_ms":')
    line = bytearray(lines[number])
    line[at] ^= 1
    return [*lines[:number], bytes(line), *lines[number + 1 :]]


def numbers(run):
    """step_ms by rank and global step."""
    values = run.metrics["step_ms"]
    return {
        (rank, step): values[i, k]
        for i, rank in enumerate(run.ranks)
        for k, step in enumerate(run.global_step.tolist())
    }


DAMAGE = {
    "a flipped bit": lambda folder: change_lines(
        folder / "rank_0_metrics.jsonl", lambda lines: flipped(lines, 7)
    ),
    "noise within a line": lambda folder: change_lines(
        folder / "rank_1_metrics.jsonl", lambda lines: [*lines[:9], b"\x00\xff noise\n", *lines[10:]]
    ),
    "lines twice": lambda folder: change_lines(
        folder / "rank_1_metrics.jsonl", lambda lines: [*lines[:20], *lines[15:]]
    ),
    "run.json torn": lambda folder: (folder / "run.json").write_bytes(b'{"schema": 2, "wor'),
    "a rank of noise": lambda folder: (folder / "rank_1_metrics.jsonl").write_bytes(b"\x00" * 4096),
    "a rank's file gone": lambda folder: (folder / "rank_1_metrics.jsonl").unlink(),
    "an empty file": lambda folder: (folder / "rank_0_metrics.jsonl").write_bytes(b""),
    "a line of another run": lambda folder: change_lines(
        folder / "rank_0_metrics.jsonl",
        lambda lines: [*lines[:5], lines[5].replace(b'"one"', b'"two"'), *lines[6:]],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_left_is_read_with_its_coverage_first_and_strict_refuses(folder, damage):
    whole = load_run(folder, "run")
    assert not whole.story
    DAMAGE[damage](folder)
    with pytest.raises(AortaError):
        load_run(folder, "run")
    left = load_run(folder, "run", reading=LEFT)
    assert left.story[0].startswith("damaged or missing: ")
    assert f"{len(left.ranks)} of 2 ranks and {left.num_steps} of at least" in left.story[0]
    assert numbers(left).items() <= numbers(whole).items()  # no number that was not recorded
    assert left.num_steps >= whole.num_steps - 2


def test_the_damaged_line_alone_is_left_out_and_named(folder):
    DAMAGE["a flipped bit"](folder)
    left = load_run(folder, "run", reading=LEFT)
    whole_steps = [record.global_step for record in read_steps(folder / "rank_1_metrics.jsonl", [])]
    assert left.global_step.tolist() == [step for step in whole_steps if step != whole_steps[7]]
    assert any("1 line is left out, the first is line 8: " in note for note in left.notes)


@pytest.fixture
def closed(folder):
    """The run with what its ranks tell of the lines that they have written."""
    state = ProcessState(
        run_id="one", attempt=0, rank=0, world_size=2, host="", pid=1, process_start=None, started_unix_ns=0,
        written_unix_ns=0, ending=Ending(kind="finished"),
    )  # fmt: skip
    run = read_run(folder)
    run.attempts.append(AttemptRecord(attempt=0, world_size=2, started_unix_ns=0, ending=state.ending))
    write_json(folder / "run.json", run)
    for rank in range(2):
        path = folder / f"rank_{rank}_metrics.jsonl"
        StateFile(folder / state_name(rank), 0).write(msgspec.structs.replace(state, rank=rank))
        tally = Tally(folder / state_name(rank), 0)
        for record in read_steps(path, []):
            tally.add(record, None)
        tally.close()
        assert not load_run(folder, "run").story
    return folder


@pytest.mark.parametrize(("num_left", "is_enough"), [(25, True), (9, False)])
def test_a_file_that_ends_before_what_its_rank_had_written_is_damaged(closed, num_left, is_enough):
    """Both files are cut at the end of a line, so that nothing but what the ranks tell shows it."""
    for rank in range(2):
        change_lines(closed / f"rank_{rank}_metrics.jsonl", lambda lines: lines[:num_left])
    with pytest.raises(AortaError, match=r"rank 0 had recorded up to step \d+, its file ends at step"):
        load_run(closed, "run")
    if is_enough:
        left = load_run(closed, "run", reading=LEFT)
        assert f"{left.num_steps} of at least 32 steps" in left.story[0]
    else:
        with pytest.raises(AortaError, match="too little is left: 9 of at least 32 steps"):
            load_run(closed, "run", reading=LEFT)


def test_lines_that_are_taken_out_of_a_file_are_damage(closed):
    change_lines(closed / "rank_1_metrics.jsonl", lambda lines: [*lines[:10], *lines[12:]])
    with pytest.raises(AortaError, match=r"rank_1_metrics\.jsonl: 2 lines are missing \(2 before line 11"):
        load_run(closed, "run")
    left = load_run(closed, "run", reading=LEFT)
    assert "2 lines are missing" in left.story[0]
    assert left.num_steps == 30


def test_records_that_are_read_again_leave_the_same_line_out(folder):
    DAMAGE["a flipped bit"](folder)
    left = load_run(folder, "run", reading=LEFT)
    assert [record.global_step for record in left.records(0)] == left.global_step.tolist()


def test_a_step_whose_numbers_contradict_each_other_is_left_out(folder):
    path = folder / "rank_0_metrics.jsonl"
    records = list(read_steps(path, []))
    wrong = msgspec.structs.replace(records[4].overlap, compute_ms=1000.0)
    records[4] = msgspec.structs.replace(records[4], overlap=wrong)
    path.write_bytes(b"")
    with LineWriter.append(path) as writer:
        for record in records:
            writer.write(record)
    left = load_run(folder, "run", reading=LEFT)
    assert records[4].global_step not in left.global_step
    assert "parts of rank_0_metrics.jsonl" in left.story[0]


def test_without_a_rank_nobody_is_said_to_have_come_last(folder):
    (folder / "rank_1_metrics.jsonl").unlink()
    left = load_run(folder, "run", reading=LEFT)
    assert left.ranks == [0]
    assert left.arrivals is None or not left.arrivals.num_judged.any()


def test_nothing_left_is_one_line(folder):
    for path in folder.glob("rank_*"):
        path.write_bytes(b"\x00" * 100)
    with pytest.raises(AortaError, match="nothing is left to read"):
        load_run(folder, "run", reading=LEFT)


def test_another_schema_is_refused_and_not_called_damage(folder):
    shutil.copy(folder / "rank_0_metrics.jsonl", folder / "whole")
    path = folder / "rank_0_metrics.jsonl"
    records = list(read_steps(path, []))
    path.write_bytes(b"")
    with LineWriter.append(path) as writer:
        for record in records:
            writer.write(msgspec.structs.replace(record, schema=99))
    left = load_run(folder, "run", reading=LEFT)
    assert any("written with record schema 99" in note for note in left.notes)


def test_less_than_half_of_the_steps_is_too_little(folder):
    change_lines(folder / "rank_0_metrics.jsonl", lambda lines: [*lines[:10], b"noise\n", *lines[30:]])
    with pytest.raises(AortaError, match=r"too little is left.*; without rank_0_metrics\.jsonl, moved out"):
        load_run(folder, "run", reading=LEFT)
    (folder / "rank_0_metrics.jsonl").rename(folder.parent / "rank_0_metrics.jsonl")
    assert load_run(folder, "run", reading=LEFT).ranks == [1]


def test_a_run_in_which_ranks_reported_a_hang_says_who_names_it(folder):
    (folder / "hang").mkdir()
    for rank in range(2):
        (folder / "hang" / f"rank{rank}.json").write_text("{}")
    told = f"aorta hang {folder} names the rank that was waited for"
    assert load_run(folder, "run").story == [f"2 ranks reported that no step began any more: {told}"]


def test_a_run_that_died_before_its_first_step_tells_how(tmp_path):
    crashed = Ending(kind="crashed", why="ValueError: planted", ranks=[0])
    attempt = AttemptRecord(attempt=0, world_size=1, started_unix_ns=0, ending=crashed)
    with RunFolder(tmp_path, 0) as folder:
        folder.write_run(run_record(1, run_id="one", attempts=[attempt]))
    (tmp_path / "rank_0_metrics.jsonl").write_bytes(b"")
    with pytest.raises(AortaError, match=r"no step was recorded; crashed on rank 0: ValueError: planted"):
        load_run(tmp_path, "run")
