"""Where a report is written: nothing half, nothing silently stale, one line for what cannot be."""

from pathlib import Path

import pytest

from aorta.errors import ReportError
from aorta.page.write import Outputs, write_report
from tests.dist.launch import run_python
from tests.records.run_folders import run_record, step_record, step_timeline, write_run
from tests.unprivileged import mode, python_without_rights

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "analysis" / "overlap_report.py"
FEW = Outputs(page=False, perfetto=False)


def small_run(folder, **options):
    records = [step_record(step_timeline(rank=r, step=i), **options) for i in range(4) for r in range(2)]
    return write_run(folder, records, run_record(2))


def script(*arguments):
    return run_python(SCRIPT, *arguments)


def test_files_of_an_earlier_report_are_left_and_named(tmp_path):
    run, out = small_run(tmp_path / "run"), tmp_path / "out"
    out.mkdir()
    for name in ("old_timeline.png", "comparison.png", "steps.parquet", "mine.txt"):
        (out / name).write_text("older")
    text = write_report([run], ["a"], out, outputs=FEW).text
    assert text.splitlines()[-1] == "left in place, not part of this report: comparison.png, old_timeline.png"
    assert (out / "comparison.png").read_text() == "older"
    assert "left in place" not in write_report([run], ["a"], tmp_path / "other", outputs=FEW).text


@pytest.mark.heavy
def test_a_folder_where_a_file_should_be_is_refused_before_anything_is_written(tmp_path):
    out = tmp_path / "out"
    (out / "summary.json").mkdir(parents=True)
    with pytest.raises(ReportError, match=r"cannot write .*summary\.json: it is a folder"):
        write_report([small_run(tmp_path / "run")], ["a"], out)
    assert [path.name for path in out.iterdir()] == ["summary.json"]


def test_an_output_that_cannot_be_is_refused_before_the_input_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot be made: .*file is a file, not a folder"):
        write_report([tmp_path / "does not exist"], ["a"], tmp_path / "file" / "out")


@pytest.mark.parametrize("bits", [0o000, 0o444], ids=["closed", "listed"])
def test_a_run_that_may_not_be_read_is_one_line(tmp_path, bits):
    run = small_run(tmp_path / "run")
    with mode(run, bits):
        done = python_without_rights(SCRIPT, "--log-dir", run, "--label", "a", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == f"error: cannot read {run}: Permission denied\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [0o000, 0o600], ids=["closed", "not-entered"])
def test_an_output_that_may_not_be_entered_is_one_line(tmp_path, bits):
    run, closed = small_run(tmp_path / "run"), tmp_path / "closed"
    closed.mkdir()
    for output in (closed, closed / "out"):
        with mode(closed, bits):
            done = python_without_rights(SCRIPT, "--log-dir", run, "--label", "a", "--output", output)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: --output {output} cannot be")
        assert done.stderr.count("\n") == 1


def test_names_out_of_a_record_cannot_move_the_cursor(tmp_path):
    run = small_run(tmp_path / "run", not_measured={"host_ms": "it is\x1b[2J\rgone"}, host_ms=None)
    text = write_report([run], ["a"], tmp_path / "out", outputs=FEW).text
    assert r"it is\x1b[2J\rgone" in text
    assert all(letter.isprintable() for letter in text.replace("\n", ""))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--log-dir", "x", "--output", "y"], "Missing option '--label'"),
        (["--log-dir", "x", "--label", "a", "--output", "y", "--warmup", "-1"], "not in the range x>=0"),
        (["--log-dir", "x", "--label", "a", "--output", "y", "--jobs", "two"], "'two' is not a valid int"),
        (["--log-dir", "x", "--label", "a", "--output", "y", "--warm-up", "3"], "No such option"),
    ],
)
def test_wrong_options_are_one_line(arguments, says):
    done = script(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_run_json_is_known_for_what_it_is(tmp_path):
    run = small_run(tmp_path / "run")
    done = script("--log-dir", run / "run.json", "--label", "a", "--output", tmp_path / "out")
    assert done.returncode == 2
    assert "give the folder that it is in" in done.stderr


@pytest.mark.heavy
def test_outputs_written_at_the_same_time_are_those_written_in_turn(tmp_path):
    run = small_run(tmp_path / "run")
    texts = [
        write_report([run], ["a"], tmp_path / str(jobs), outputs=Outputs(jobs=jobs)).text.replace(
            str(tmp_path / str(jobs)), "OUT"
        )
        for jobs in (1, 2)
    ]
    assert texts[0] == texts[1]
    in_turn, at_once = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "12"
    )
    assert in_turn == at_once
