"""Report, why and compare read the same traces alike, and call what is no run so."""

import json
from pathlib import Path

import pytest

from tests.cli.examples import QUIET, run
from tests.larger_data import FOLDER, needs_data
from tests.traces.trace_writers import kineto

FOREIGN = FOLDER / "traces_foreign"
pytestmark = pytest.mark.heavy
SUBSET = FOREIGN / "ranks_0_1_of_128"


def write(folder: Path, *ranks: int, world_size: int) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in ranks:
        (folder / f"rank{rank}.json").write_bytes(kineto(rank, world_size))
    return folder


def summary_of(path: Path, output: Path, *options: str) -> dict:
    done = run("report", str(path), "-o", str(output), *QUIET, *options)
    assert done.exit_code == 0, done.output
    (dataset,) = json.loads((output / "summary.json").read_text())["datasets"].values()
    return dataset


def why(path: Path, *options: str) -> dict:
    done = run("why", str(path), "--json", *options)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def fault_of(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


# ---- some ranks of a run -----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_some_ranks_are_read_by_every_command(tmp_path, ranks):
    folder = write(tmp_path / "a", *ranks, world_size=3)
    note = f"{len(ranks)} of 3 ranks: waiting for the others is not split from transfer"
    assert why(folder)["ranks"] == list(ranks)
    assert note in why(folder)["notes"]
    printed = run("report", str(folder), "-o", str(tmp_path / "out"), *QUIET)
    assert printed.output.count(note) == 1
    compared = run("compare", str(folder), str(write(tmp_path / "b", *ranks, world_size=3)), *QUIET)
    assert compared.exit_code == 0, compared.output


@needs_data(SUBSET)
def test_two_of_128_ranks(tmp_path):
    """Their groups are not told: of 10 collectives on each rank none can be matched."""
    dataset, answer = summary_of(SUBSET, tmp_path), why(SUBSET)
    assert (dataset["num_steps"], answer["num_steps"]) == (2, 2)
    names = [row["name"] for row in answer["account"] if row["mean_ms"] > 0]
    assert "wait" not in names
    assert "transfer" not in names
    assert any(note.startswith("2 of 128 ranks") for note in answer["notes"])
    assert not any("clocks of ranks shifted" in note for note in answer["notes"])


# ---- chosen steps and ranks --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["traces", "records"])
def test_the_same_choice_for_traces_and_records(tmp_path, runs, kind):
    path = write(tmp_path / "a", 0, 1, world_size=2) if kind == "traces" else runs / "fsdp"
    whole = why(path)
    chosen = why(path, "--steps", "2:2", "--ranks", "1")
    assert (chosen["ranks"], chosen["num_steps"]) == ([1], 1)
    assert whole["ranks"] == [0, 1]
    summary_of(path, tmp_path / "out", "--draw-steps", "2:2", "--draw-ranks", "1")
    for draw, command in (("", ("why",)), ("draw-", ("report", "-o", str(tmp_path / "out"), *QUIET))):
        assert "no rank 7" in fault_of(*command, str(path), f"--{draw}ranks", "7")
        assert "ranks are below 1,000,000" in fault_of(*command, str(path), f"--{draw}ranks", "0-99999999999")
        assert "the last rank comes before the first" in fault_of(
            *command, str(path), f"--{draw}ranks", "1-0"
        )
        assert "is not a list of ranks" in fault_of(*command, str(path), f"--{draw}ranks", "²")
        assert "is not FIRST:LAST" in fault_of(*command, str(path), f"--{draw}steps", "²")
        assert "none from 900 to 900" in fault_of(*command, str(path), f"--{draw}steps", "900")


def test_a_trace_without_steps_is_step_0(tmp_path):
    data = json.loads(kineto())
    data["traceEvents"] = [event for event in data["traceEvents"] if "Step" not in event["name"]]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(data))
    answer = why(path, "--steps", "0:0")
    assert answer["num_steps"] == 1
    assert answer["replayed_step"] is None
    text = run("why", str(path)).output
    assert "critical path of the whole trace" in text
    assert "None" not in text
    assert "launch_bound" not in text  # the device may be busy meanwhile
    assert "mark no steps" in fault_of("why", str(path), "--if", "gemm x0.5", "--steps", "3:4")


# ---- what is no run ----------------------------------------------------------------------------


def test_a_report_is_not_read_as_a_trace(tmp_path):
    """The report of a folder of traces lies in that folder, and has a drawing in their format."""
    folder = write(tmp_path / "a", 0, 1, world_size=2)
    before = why(folder)
    done = run("report", str(folder), "--no-page", "--no-parquet")
    assert done.exit_code == 0, done.output
    (drawing,) = (folder / "report").glob("*.perfetto.json.gz")
    assert why(folder) == before
    assert "is a drawing of a report" in fault_of("report", str(drawing))
    assert "is no run" in fault_of("report", str(folder / "report"))


@pytest.mark.parametrize(
    "command", [("report",), ("why",), ("compare", "."), ("why", "--if", "gemm x0.5")], ids=" ".join
)
def test_a_folder_that_is_no_run_is_called_so(tmp_path, monkeypatch, command):
    monkeypatch.chdir(write(tmp_path / "a", 0, world_size=1))
    other = tmp_path / "other"
    (other / "below").mkdir(parents=True)
    (other / "empty.json").touch()
    (other / "below" / "settings.json").write_text("{}")
    assert f"{other} is no run: it holds neither" in fault_of(*command, str(other))
    assert {path.name for path in other.iterdir()} == {"below", "empty.json"}


def test_a_tree_is_not_walked_for_a_trace(tmp_path, monkeypatch):
    """Behind many files that are no traces nothing is looked for."""
    monkeypatch.setattr("aorta.traces.sources.MOST_WITHOUT_TRACE", 10)
    for i in range(20):
        (tmp_path / f"{i}.txt").touch()
    write(tmp_path / "below", 0, world_size=1)
    assert "is no run" in fault_of("report", str(tmp_path))
    monkeypatch.setattr("aorta.traces.sources.MOST_WITHOUT_TRACE", 100)
    assert why(tmp_path)["ranks"] == [0]
