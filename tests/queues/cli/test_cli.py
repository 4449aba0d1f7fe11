"""The commands: one document with --json, one line for bad input, exit codes, files that stay."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from aorta.account.results.schema import Document, read_document, write_document
from aorta.queues import catalogue, workloads
from aorta.queues.cli import COMMANDS, main
from scripts import queues_catalogue
from tests.dist.launch import run_python
from tests.queues import sleep_workloads
from tests.queues.documents import document, point

ROOT = Path(__file__).parents[3]
QUICK = ("--iterations", "8", "--warmup", "1", "--sleep-ms", "1")

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command line, with the made workloads instead of the real ones."""
    workloads.workloads.cache_clear()
    monkeypatch.setattr(workloads, "_modules", lambda package: [sleep_workloads])
    listed = {workload.name: workload for workload in queues_catalogue.listed(workloads.workloads().values())}
    monkeypatch.setattr(catalogue, "catalogue", lambda: listed)
    yield lambda *arguments: CliRunner().invoke(main, [str(one) for one in arguments])
    workloads.workloads.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run sleps", "sleps is not a workload, did you mean 'sleeps'?"),
        ("run sleeps --streams 0", "--streams must be 1 to 64, got '0'"),
        ("run sleeps --streams 10000", "--streams must be 1 to 64, got '10000'"),
        ("run sleeps --streams x", "--streams must be 1 to 64, got 'x'"),
        ("run sleeps --streams 9", "sleeps uses 1 to 8 streams, not 9"),
        ("run sleeps --mm-dim 4", "--mm-dim is an option of overlap, not of sleeps"),
        ("run overlap -s 2 --fail", "--fail is an option of sleeps, not of overlap"),
        ("run overlap -s 2 --comm-size lots", "--comm-size must be a size"),
        ("run overlap -s 2 --process-groups [0,1]", "--process-groups must hold each of the 1 ranks"),
        ("run sleeps --pieces 0", "--pieces must be at least 1, got 0"),
        ("run sleeps --iterations 0", "--iterations must be at least 1, got 0"),
        ("run sleeps --warmup -1", "--warmup must not be negative, got -1"),
        ("run sleeps --device gpu", "--device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ("run sleeps --backend gloo", "--backend gloo needs a process group; start with torchrun"),
        ("run sleeps --sync-mode sometimes", "'sometimes' is not one of"),
        ("run sleeps --no-such-option", "No such option"),
        ("run sleeps --iterations few", "'few' is not a valid integer"),
        ("sweep sleeps --streams 1,,2", "--streams must be 1 to 64, got ''"),
        ("sweep sleeps --streams 9,10", "no point of the sweep is possible"),
        ("run-priority P7", "'P7' is not one of"),
        ("run leep", "leep is not a workload, did you mean 'sleeps'?"),
        ("compare --baseline a.json --test b.json", "a.json: cannot be read: No such file or directory"),
        ("profile sleps", "sleps is not a workload"),
        ("fly", "fly is not a command; commands: list, run,"),
        ("lst", "lst is not a command, did you mean 'list'?"),
        ("run sleeps --streams 2 --stop no_compiler", "there is no compiler here"),
        ("profile sleeps --streams 2 --nosuch", "No such option"),
        ("profile sleeps --streams 2 --profile-dir /dev/null", "--profile-dir /dev/null is a file"),
        ("profile sleeps --streams 2 --profile-dir /proc/a/b", "/proc/a/b cannot be written"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: str, message: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_of_many_ranks_the_first_says_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        result = run("run", "sleeps", "--streams", "0")
        said[rank] = (result.exit_code, result.stderr)
    assert said == {"0": (2, "error: --streams must be 1 to 64, got '0'\n"), "1": (2, "")}


def test_without_a_command_there_is_help(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ")


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_one_line(run: Run) -> None:
    result = run("run", "sleeps", "--device", "cuda:3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --device cuda:3 needs 4 GPUs on this machine, it has 0\n"


def test_list_is_a_list_of_objects(run: Run) -> None:
    rows = json.loads(run("list", "--json").stdout)
    assert [row["name"] for row in rows] == ["sleeps", "overlap"]
    assert rows[1] == {
        "name": "overlap", "priority": "P1", "unit": "steps",
        "question": "How much is hidden?", "min_streams": 2, "max_streams": 2,
    }  # fmt: skip
    assert "one for compute, one for communication" in " ".join(run("list", "--verbose").stdout.split())


def test_help_names_every_command() -> None:
    """That it does not wait for torch is tested with all commands of aorta: tests/cli/test_commands.py."""
    text = " ".join(CliRunner().invoke(main, ["--help"]).stdout.split())
    assert "run-priority Measure every workload of a priority over stream counts." in text
    assert "probe Count hardware queues; measure what a switch costs and what priorities do." in text


def test_the_catalogue_is_made_from_the_workloads() -> None:
    assert queues_catalogue.text() == catalogue.CATALOGUE.read_bytes(), "run scripts/queues_catalogue.py"


def test_help_shows_the_options_of_the_workload_that_is_named(run: Run) -> None:
    daily, everything = run("run", "--help").stdout, run("run", "--help-all").stdout
    sleeps = run("run", "sleeps", "--help").stdout
    for rare in ("--mm-dim", "--sleep-ms", "--backend"):
        assert rare in everything
        assert rare not in daily
    assert "--sleep-ms" in sleeps
    assert "--iterations" in sleeps
    assert "--mm-dim" not in sleeps
    assert "--mm-dim is an option of overlap" in run("run", "sleeps", "--mm-dim", "4").stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen(command: str) -> None:
    arguments = [command, *(["comms_compute_overlap"] if command in ("run", "sweep") else []), "--help"]
    assert len(CliRunner().invoke(main, arguments).stdout.splitlines()) <= 45


def test_run_prints_one_document_and_nothing_else(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    result = run("run", "sleeps", "--streams", 2, *QUICK, "--json", "--output", output)
    assert result.exit_code == 0
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert found["points"][0]["configuration"]["options"]["sleep_ms"] == 1.0
    assert json.loads(output.read_text()) == found
    assert read_document(output).setting.queues == "none: worker threads"


@pytest.mark.heavy
def test_run_shows_numbers_with_their_spread_and_says_what_they_are(run: Run) -> None:
    result = run("run", "overlap", "--streams", 2, "--iterations", 8, "--warmup", 1)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    text = " ".join(result.stdout.split())
    for expected in ("collectives simulated", "source: threads", "results are correct", "latency_p50_ms",
                     "overlap_efficiency", "n/a: needs a GPU (queue_switch_us)"):  # fmt: skip
        assert expected in text


def test_wrong_results_exit_1(run: Run) -> None:
    result = run("run", "sleeps", "--streams", 2, *QUICK, "--fail", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["points"][0]["status"] == "failed"


@pytest.mark.heavy
def test_a_file_is_not_overwritten_and_nothing_is_measured_for_it(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "a.json"
    output.write_text("mine")
    result = run("run", "sleeps", "--iterations", 100000, "--output", output)
    assert result.exit_code == 2
    assert result.stderr.strip() == f"error: {output} already exists; give another name or --overwrite"
    assert output.read_text() == "mine"
    below = run("run", "sleeps", "--iterations", 100000, "--output", output / "b.json")
    assert below.exit_code == 2
    assert "cannot be written" in below.stderr
    assert run("run", "sleeps", *QUICK, "--output", output, "--overwrite").exit_code == 0
    assert read_document(output).points


@pytest.mark.heavy
def test_a_sweep_has_skipped_points_scaling(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    result = run(
        "sweep",
        "sleeps",
        "-s",
        "16,1,2",
        *QUICK,
        "--sleep-ms",
        5,
        "--pieces",
        2,
        "-o",
        output,
    )
    assert result.exit_code == 0
    assert "16 streams skipped: sleeps uses 1 to 8 streams" in result.stdout
    found = read_document(output)
    assert [(one.configuration["streams"], one.status) for one in found.points] == [
        (1, "measured"), (2, "measured"), (16, "skipped"),
    ]  # fmt: skip
    (scaling,) = found.scaling
    assert scaling.speedup[1] > 1


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("stop", "status", "reason"),
    [
        ("no_compiler", 1, "there is no compiler here"),
        ("no_memory", 1, "out of memory, give smaller sizes: "),
    ],
)
def test_a_point_that_cannot_be_set_up_does_not_cost_the_others(
    run: Run, stop: str, status: int, reason: str
) -> None:
    result = run("sweep", "sleeps", "-s", "1,2,4", *QUICK, "--no-pieces", "--stop", stop, "--json")
    assert (result.exit_code, result.stderr) == (status, "")
    points = json.loads(result.stdout)["points"]
    assert [point["status"] for point in points] == ["measured", "failed", "measured"]
    assert points[1]["reason"].startswith(reason)


@pytest.mark.heavy
def test_an_interrupted_sweep_keeps_the_points_that_it_has(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    given = (*QUICK, "--no-pieces", "--stop", "interrupt", "-o", output)
    assert run("sweep", "sleeps", "-s", "2,4", *given).exit_code == 130
    assert not output.exists(), "there was none"
    result = run("sweep", "sleeps", "-s", "1,2,4", *given)
    assert result.exit_code == 130
    assert "2 streams skipped: interrupted before it was measured" in result.stdout
    found = [(one.configuration["streams"], one.status) for one in read_document(output).points]
    assert found == [(1, "measured"), (2, "skipped"), (4, "skipped")]


@pytest.mark.heavy
def test_run_priority_takes_the_workloads_of_a_priority(run: Run) -> None:
    result = run("run-priority", "P1", "--streams", "1,2", "--iterations", 3, "--warmup", 0, "--json")
    found = json.loads(result.stdout)
    assert [(one["configuration"]["workload"], one["status"]) for one in found["points"]] == [
        ("overlap", "skipped"), ("overlap", "measured"),
    ]  # fmt: skip


@pytest.mark.heavy
def test_a_trace_is_named_for_its_rank_and_not_overwritten(run: Run, tmp_path: Path) -> None:
    given = ("run", "sleeps", "-s", 2, *QUICK, "--profile", "--profile-dir", tmp_path)
    assert run(*given).exit_code == 0
    (trace,) = tmp_path.iterdir()
    assert trace.name == "sleeps_streams2_rank0.pt.trace.json"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "sleeps::per_iteration" in names
    result = run(*given)
    assert result.exit_code == 2
    assert "already exists" in result.stderr


def saved(path: Path, made_document: Document) -> Path:
    write_document(path, made_document)
    return path


@pytest.mark.parametrize(("ms", "status"), [(10.0, 0), (13.0, 1), (10.5, 3)])
def test_compare_exits_with_the_verdict(run: Run, tmp_path: Path, ms: float, status: int) -> None:
    old = saved(tmp_path / "a.json", document(point(1, 10, spread=0.03, seed=1)))
    new = saved(tmp_path / "b.json", document(point(1, ms, spread=0.03, seed=2)))
    result = run("compare", "--baseline", old, "--test", new, "--json")
    assert result.exit_code == status
    assert (
        json.loads(result.stdout)["verdict"]
        == {0: "no regression", 1: "regression", 3: "cannot tell"}[status]
    )
    assert run("compare", "--baseline", old, "--test", new).exit_code == status


@pytest.mark.parametrize("threshold", ["many", "-5%", "120%", ""])
def test_thresholds_that_are_none(run: Run, tmp_path: Path, threshold: str) -> None:
    path = saved(tmp_path / "a.json", document(point()))
    result = run("compare", "-b", path, "-t", path, "--threshold", threshold)
    assert result.exit_code == 2
    assert "--threshold must be a share such as 5% or 0.05" in result.stderr


def test_the_script_compares_and_draws(tmp_path: Path) -> None:
    old = saved(tmp_path / "a.json", document(point(1, 10, seed=1), point(2, 5, seed=2)))
    new = saved(tmp_path / "b.json", document(point(2, 7, seed=3), point(1, 10, seed=4)))
    picture = tmp_path / "c.png"
    command = [ROOT / "scripts" / "analyze_sweep_results.py", "--baseline", old, "--test", new]
    command += ["--plot", picture]
    first = run_python(*command, cwd=tmp_path)
    assert first.returncode == 1
    assert "regression" in first.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
    again = run_python(*command, cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name):
    command = main.get_command(click.Context(main), name)
    assert (command.help or "").partition(".")[0] + "." == COMMANDS[name][1]
