import json
import logging
import os
import time

import pytest

from aorta.errors import RecordError
from aorta.records.reader import read_run, read_steps
from aorta.records.writer import LineWriter, RunFolder, move_aside, write_json
from tests.dist.launch import run_python
from tests.records.plain_records import run, step


def test_what_is_written_is_read_back(tmp_path):
    with RunFolder(tmp_path / "out", rank=3) as folder:
        assert folder.steps.write(step(0))
        assert folder.steps.write(step(1, loss=None))
        assert folder.write_run(run())
    assert list(read_steps(tmp_path / "out" / "rank_3_metrics.jsonl")) == [step(0), step(1, loss=None)]
    assert read_run(tmp_path / "out") == run()


def test_a_killed_process_leaves_every_line_it_wrote(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    code = (
        "import os, signal\n"
        "from aorta.records.writer import LineWriter\n"
        f"writer = LineWriter.create({str(path)!r})\n"
        "for i in range(5): writer.write({'i': i})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run_python("-c", code).returncode == -9
    assert [json.loads(line)["i"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_an_existing_file_is_neither_appended_to_nor_overwritten(tmp_path):
    path = tmp_path / "rank_0_metrics.jsonl"
    path.write_text("old\n")
    with pytest.raises(RecordError, match="exists and is not overwritten"):
        RunFolder(tmp_path, 0)
    assert path.read_text() == "old\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device of Linux")
def test_a_full_disk_stops_recording_with_one_warning(caplog):
    writer = LineWriter(os.open("/dev/full", os.O_WRONLY), "/dev/full")
    with caplog.at_level(logging.WARNING):
        assert [writer.write(step(i)) for i in range(3)] == [False] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "aorta: recording stopped: cannot write /dev/full: No space left on device"
    ]
    assert not writer.recording
    assert (writer.num_written, writer.num_lost) == (0, 3)
    writer.close()


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, monkeypatch):
    """The disk takes one line and half of the next."""
    path = tmp_path / "rank_0_metrics.jsonl"
    writer = LineWriter.create(path)
    writer.write(step(0))
    real, calls = os.write, []

    def half(descriptor, data):
        calls.append(1)
        if len(calls) == 1:
            return real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    assert not writer.write(step(1))
    monkeypatch.undo()
    assert list(read_steps(path)) == [step(0)]


def test_writing_after_close_loses_the_line_quietly(tmp_path):
    writer = LineWriter.create(tmp_path / "a.jsonl")
    writer.close()
    assert not writer.write(step())
    assert writer.num_lost == 1


def test_a_finished_run_is_moved_aside_whole(tmp_path):
    (tmp_path / "run.json").write_text("old run")
    (tmp_path / "rank_0_metrics.jsonl").write_text("old 0")
    (tmp_path / "rank_11_metrics.jsonl").write_text("old 11")
    (tmp_path / "torch_profiler" / "rank0").mkdir(parents=True)
    (tmp_path / "mine.txt").write_text("the user's")
    aside = move_aside(tmp_path)
    assert aside is not None
    assert aside.parent == tmp_path
    assert aside.name.startswith("previous-")
    assert (aside / "rank_11_metrics.jsonl").read_text() == "old 11"
    assert (aside / "torch_profiler" / "rank0").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt", aside.name]


def test_a_report_goes_with_the_run_that_it_is_of(tmp_path):
    """Where scripts/demo.sh writes it. Without a summary.json it is a folder of the user's."""
    for name in ("summary.json", "report.html"):
        (tmp_path / "report").mkdir(exist_ok=True)
        (tmp_path / "report" / name).write_text("old")
        (tmp_path / "run.json").write_text("{}")
        aside = move_aside(tmp_path, ("run.json", "rank_0_metrics.jsonl"))
        assert (aside / "report").exists() == (name == "summary.json")
        assert (tmp_path / "report").exists() != (name == "summary.json")


def test_a_rank_that_moves_only_its_own_file_leaves_the_report(tmp_path):
    (tmp_path / "report").mkdir()
    for name in ("report/summary.json", "run.json", "rank_1_metrics.jsonl"):
        (tmp_path / name).write_text("old")
    move_aside(tmp_path, ("rank_1_metrics.jsonl",))
    assert (tmp_path / "report" / "summary.json").exists()


def test_two_runs_in_one_second_are_moved_to_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0)))
    names = []
    for _ in range(2):
        (tmp_path / "run.json").write_text("{}")
        names.append(move_aside(tmp_path).name)
    assert names == ["previous-20260102T030405Z", "previous-20260102T030405Z-2"]


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_to_move_makes_no_folder(tmp_path, exists):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    assert move_aside(folder) is None
    assert not list(tmp_path.glob("out/*"))


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot make the folder"):
        RunFolder(tmp_path / "file" / "out", 0)


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_run_json_that_cannot_be_written_warns_once(tmp_path, caplog):
    with RunFolder(tmp_path / "out", 0) as folder:
        (tmp_path / "out" / "run.json").mkdir()  # a rename onto a folder fails, for root too
        assert not folder.write_run(run())
        assert not folder.write_run(run())
    assert len(caplog.records) == 1
