"""Every subcommand: its help, its mistakes, its exit codes, its JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aorta.cli import COMMANDS, main
from aorta.cli.report import label_of, report_folder
from aorta.errors import BAD_INPUT, CANNOT_TELL, FINE, VIOLATED
from aorta.records.writer import write_json
from tests.cli.examples import ELSEWHERE, JSON, NO_RESULTS, QUIET, run
from tests.cli.tree import commands
from tests.records.run_folders import noisy_run, run_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_command_does(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == FINE
    assert result.output.startswith(f"Usage: main {command} ")
    assert len(COMMANDS[command][1]) < 80


def test_no_help_loads_torch() -> None:
    """Of the subcommands and of the commands within them."""
    code = """
import sys
from click.testing import CliRunner
from aorta.cli import main
from tests.cli.examples import ELSEWHERE, JSON, NO_RESULTS, QUIET, run
from tests.cli.tree import commands
for words in commands(main):
    assert CliRunner().invoke(main, [*words, "--help"]).exit_code == 0
    heavy = [name for name in ("torch", "scipy", "matplotlib", "plotly", "pandas") if name in sys.modules]
    assert not heavy, (words, heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("repot",), BAD_INPUT, "repot is not a command, did you mean 'report'?"),
        (("report",), BAD_INPUT, "Missing argument 'RUN...'"),
        (("why",), BAD_INPUT, "Missing argument 'RUN|TRACE...'"),
        (("report", "nowhere"), BAD_INPUT, "error: there is no folder or trace nowhere"),
        (("report", "--wramup", "3", "x"), BAD_INPUT, "No such option"),
        (("compare", "nowhere", "nowhere else"), BAD_INPUT, "there is no folder or trace nowhere"),
        (("top", "nowhere"), BAD_INPUT, "nowhere: no such folder"),
        (("capture", "nowhere"), BAD_INPUT, "nowhere"),
        (("merge", "nowhere"), BAD_INPUT, "nowhere"),
        (("hang", "nowhere"), BAD_INPUT, "nowhere"),
        (("sweep", "--recipe", "nowhere.yaml"), BAD_INPUT, "nowhere.yaml: cannot be read: No such file"),
        (("run",), BAD_INPUT, "Missing argument 'COMMAND...'"),
        (("run", "--", "no-such-program"), BAD_INPUT, "no-such-program: no such command"),
        (("run", "--", __file__), BAD_INPUT, "a file that may not be executed: name"),
        (("check", "."), BAD_INPUT, ".: a folder, no command; aorta report and aorta why read a run"),
        (("check", "-o", "/proc/x", "--", "true"), BAD_INPUT, "cannot record into /proc/x: /proc cannot be"),
        (("check", "--step-at", "train_step", "--", "true"), BAD_INPUT, "must look like module:function"),
        (("report", "x", "--markdown", "x"), BAD_INPUT, "--markdown reports on a budget or a comparison"),
        (("gate", "x", "--baseline", "/dev/null/x", "--bless"), BAD_INPUT, "cannot write /dev/null/x"),
        (("run", "--step-at", "train_step", "--", "true"), BAD_INPUT, "must look like module:function"),
        (("run", "--to", "promtheus=x", "--", "true"), BAD_INPUT, "did you mean 'prometheus'?"),
        (("run", "--to", "prometheus", "--", "true"), BAD_INPUT, "must look like prometheus=TARGET"),
        (("train", "--config", "fsdpp"), BAD_INPUT, "fsdpp"),
        (("demo", "-o", "/proc/x"), BAD_INPUT, "cannot record into /proc/x"),
        (("queues", "nowhere"), BAD_INPUT, "nowhere is not a command"),
        (("program", "lint", "nowhere"), BAD_INPUT, "cannot read nowhere"),
        (("program", "lint", "/dev/zero"), BAD_INPUT, "cannot read /dev/zero: it is no regular file"),
        (("why", "two\nlines"), BAD_INPUT, "there is no folder or trace two lines"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], exit_code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.heavy
def test_a_report_needs_the_runs_folder_alone(runs: Path) -> None:
    result = run("report", runs / "fsdp", *QUIET)
    assert result.exit_code == FINE
    assert result.stdout.startswith("fsdp: a step takes ")
    assert (runs / "fsdp" / "report" / "summary.json").exists()


@pytest.mark.heavy
def test_what_cannot_be_told_is_no_success_where_asked_to_fail(tmp_path: Path) -> None:
    two = noisy_run(tmp_path / "a", 40), noisy_run(tmp_path / "b", 40, slowdown=1.008, seed=1)
    result = run("compare", *two, *QUIET, "--fail-on-difference")
    assert result.exit_code == CANNOT_TELL
    assert result.stdout.startswith("cannot tell whether b is slower than a")


@pytest.mark.heavy
def test_a_comparison_says_so_where_asked_to_fail(runs: Path) -> None:
    two = (runs / "ddp", runs / "fsdp")
    plain = run("compare", *two, *QUIET)
    assert plain.exit_code == FINE
    verdict = json.loads((runs / "fsdp" / "comparison" / "summary.json").read_text())
    expected = {"worse": VIOLATED, "better": FINE, "same": FINE}
    code = expected.get(verdict["comparison"][verdict["main"]]["verdict"], CANNOT_TELL)
    assert run("compare", *two, *QUIET, "--fail-on-difference").exit_code == code
    if code == CANNOT_TELL:
        allowed = run("compare", *two, *QUIET, "--fail-on-difference", "--allow-cannot-tell")
        assert allowed.exit_code == FINE


@pytest.mark.heavy
@pytest.mark.parametrize(("limit", "exit_code"), [(1e6, FINE), (1e-6, VIOLATED)])
def test_a_budget_decides_the_exit_code(runs: Path, limit: float, exit_code: int) -> None:
    (runs / "budget.yaml").write_text(f"step_ms: {{max: {limit:f}}}\n")
    assert run("report", runs / "fsdp", *QUIET, "--budget", runs / "budget.yaml").exit_code == exit_code


def test_a_damaged_run_is_read_in_part_but_not_by_strict_and_not_for_a_gate(tmp_path: Path) -> None:
    folder = noisy_run(tmp_path / "run")
    (folder / "run.json").write_text('{"schema": 2, "wor')
    left = run("report", str(folder), *QUIET)
    assert left.exit_code == FINE
    assert left.stdout.splitlines()[1].startswith(
        "damaged or missing: run.json. The numbers are of what is left"
    )
    compared = run("compare", noisy_run(tmp_path / "whole"), folder, *QUIET)
    assert compared.stdout.startswith("run: damaged or missing: run.json")
    (tmp_path / "budget.yaml").write_text("step_ms: {max: 1000}")
    for more in (["--strict"], ["--budget", str(tmp_path / "budget.yaml")]):
        assert run("report", str(folder), *QUIET, *more).exit_code == BAD_INPUT


def test_every_command_that_prints_results_has_json() -> None:
    leaves = {
        " ".join(words) for words in commands(main) if words not in (("queues",), ("program",), ("project",))
    }
    leaves.discard("")
    assert leaves == JSON.keys() | NO_RESULTS | ELSEWHERE
    for name in leaves:
        has_json = "--json" in run(*name.split(), "--help").output
        assert has_json == (name not in NO_RESULTS), name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.heavy) if name == "doctor" else name for name in JSON]
)
def test_json_is_one_document(inputs: Path, name: str) -> None:
    result = run(*JSON[name], "--json")
    assert result.exit_code in (FINE, VIOLATED), result.output
    assert isinstance(json.loads(result.stdout), dict | list)


def test_top_shows_every_rank(runs: Path) -> None:
    result = run("top", runs / "fsdp", "--once")
    assert result.exit_code == FINE
    assert [line.split()[0] for line in result.stdout.splitlines()[-2:]] == ["0", "1"]


def test_top_cannot_tell_without_a_step(tmp_path: Path) -> None:
    write_json(tmp_path / "run.json", run_record(1))
    result = run("top", tmp_path, "--once")
    assert (result.exit_code, result.stdout) == (CANNOT_TELL, "no step yet\n")


def test_top_of_a_folder_without_a_run_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("x")
    (tmp_path / "rank_0_metrics.jsonl").write_text("hi")
    for flags in ((), ("--once",), ("--json",)):
        result = run("top", tmp_path, *flags)
        said = f"error: {tmp_path}: no run is recorded there; give the folder that a job records into\n"
        assert (result.exit_code, result.stdout, result.stderr) == (BAD_INPUT, "", said)


def test_a_job_that_has_ended_is_not_asked(runs: Path) -> None:
    result = run("capture", runs / "fsdp")
    assert result.exit_code == BAD_INPUT
    assert "has ended" in result.stderr


def write_own_exchange(folder: Path, gemm_stream: int = 8, gemm_us: int = 30) -> Path:
    """A trace of one kernel that no built-in rule takes for communication, and a gemm from gemm_us on."""
    rows = [("my_exchange_kernel", 7, 0, 40), ("ampere_gemm", gemm_stream, gemm_us, 50)]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur,
         "args": {"stream": stream, "device": 0, "correlation": i + 1}}
        for i, (name, stream, ts, dur) in enumerate(rows)
    ]  # fmt: skip
    path = folder / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events, "schemaVersion": 1}))
    return path


def test_own_rules_tell_which_kernels_of_a_trace_communicate(tmp_path: Path) -> None:
    trace = write_own_exchange(tmp_path)
    rules = tmp_path / "rules.yaml"
    rules.write_text("communication:\n  - {pattern: my_exchange, op: all_to_all}\n")
    arguments = ("report", trace, *QUIET, "--label", "x", "--json")
    without, given = (
        json.loads(run(*arguments, *more).stdout)["datasets"]["x"]["steps"]
        for more in ((), ("--comm-rules", rules))
    )
    assert without["comm_ms"]["median"] == 0
    assert given["comm_ms.all_to_all"]["median"] == pytest.approx(0.040)
    assert given["exposed_ms"]["median"] == pytest.approx(0.030)


def test_why_takes_own_rules_too(tmp_path: Path) -> None:
    """The gemm waits for the exchange, which is 40 of 90 us."""
    trace = write_own_exchange(tmp_path, gemm_stream=7, gemm_us=40)
    rules = tmp_path / "rules.yaml"
    rules.write_text("communication:\n  - {pattern: my_exchange, op: all_to_all}\n")
    causes = json.loads(run("why", trace, "--json", "--comm-rules", rules).stdout)["causes"]
    assert "all_to_all" in causes[0]["subject"]


@pytest.mark.parametrize("command", [("report",), ("why",), ("compare",), ("merge",)])
def test_every_command_that_reads_traces_takes_own_rules(command: tuple[str, ...]) -> None:
    assert "--comm-rules" in run(*command, "--help-all" if len(command) == 1 else "--help").stdout


def test_rules_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    trace = write_own_exchange(tmp_path)
    (tmp_path / "rules.yaml").write_text("communication:\n  - {pattern: x, op: exchange}\n")
    result = run("report", trace, *QUIET, "--comm-rules", tmp_path / "rules.yaml")
    assert result.exit_code == BAD_INPUT
    assert "'exchange' is no collective" in result.stderr


@pytest.mark.heavy
def test_why_reads_records_as_report_does(runs: Path) -> None:
    plain = run("why", runs / "fsdp", "--json")
    chosen = run("why", runs / "fsdp", "--json", "--jobs", "1")
    assert (plain.exit_code, chosen.exit_code) == (FINE, FINE)
    assert chosen.stdout == plain.stdout


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node"])
def test_ranks_are_asked_for_in_both_spellings(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(os, "execve", lambda program, command, environment: started.append(command))
    monkeypatch.setattr("aorta.training.command.main", lambda arguments, prog: FINE)  # execve came back
    assert (
        run("train", option, "2", "--override", "training.max_steps=1", "model.vocab_size=64").exit_code
        == FINE
    )
    assert started[0][-6:] == ["aorta.training", "--config", "default", "--override",
                               "training.max_steps=1", "model.vocab_size=64"]  # fmt: skip
    assert started[0][started[0].index("--nproc_per_node") + 1] == "2"


def test_the_demo_takes_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[list[str]]()

    def fail(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", fail)
    assert run("demo", "--config", "fsdp", "training.max_steps=1").exit_code == 7
    output = f"training.output_dir={Path('artifacts', 'demo')}"
    settings = ["--config", "fsdp", "--override", output, "training.max_steps=1"]
    assert started[0][-len(settings) :] == settings
    assert started[0][started[0].index("--nproc_per_node") + 1] == "2"


@pytest.mark.parametrize(
    "words", ["report", "merge", "top --once", "train --config", "project memory --model"]
)
def test_a_name_that_is_too_long_for_any_file_is_one_line(words: str) -> None:
    ended = run(*words.split(), "a" * 5000)
    assert ended.exit_code == BAD_INPUT
    assert len(ended.stderr.splitlines()) == 1


def test_a_file_that_may_not_be_read_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever below the folder that was given: root may read everything, so it is planted."""

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/proc/1/cwd")

    monkeypatch.setattr(Path, "is_dir", deny)
    monkeypatch.setattr(Path, "exists", deny)
    result = run("top", runs / "fsdp", "--once")
    assert (result.exit_code, result.stderr) == (BAD_INPUT, "error: /proc/1/cwd: Permission denied\n")


@pytest.mark.heavy
def test_doctor_answers_first_and_groups_what_it_found() -> None:
    lines = run("doctor").stdout.splitlines()
    assert lines[0] == "aorta is ready on this machine"
    titles = [line.strip() for line in lines[1:] if line.strip() and not line.startswith(" ")]
    assert titles == ["Required", "This machine", "Optional"]


def test_a_folder_of_any_name_has_a_label():
    assert label_of("caf\udce9\tone") == "caf??one"
    assert label_of("x" * 99 + "ab") == "x" * 98 + "ab"


def test_a_report_that_is_not_aorta_s_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.html").write_text("somebody's own")
    assert report_folder(tmp_path) == tmp_path / "aorta-report"
    (tmp_path / "report" / "summary.json").write_text("{}")
    assert report_folder(tmp_path) == tmp_path / "report"
