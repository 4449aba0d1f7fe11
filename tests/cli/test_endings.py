"""How every subcommand ends where its reader goes away, and on Ctrl-C: quietly, with its exit code.

In this process, with a pipe that is really closed, and an interrupt raised within the command's work. Whole
processes are tried for the entry points.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest

import aorta
from aorta.cli import main
from aorta.errors import FINE, INTERRUPTED, VIOLATED
from tests.cli.examples import ELSEWHERE, EXAMPLES, JSON, NO_RESULTS, QUIET, ROOT, run
from tests.dist.launch import run_python
from tests.limits import LIMIT_S

STARTS_PROCESSES = {"ab", "sweep", "check", "run", "train", "demo", "queues profile"}
"""What they print on stdout comes from other processes, or is tried as a process below."""
NOTHING_PRINTED = {"queues probe", "program compare", "merge"}
"""Without GPUs, kernel traces and enough measured steps they print nothing on stdout."""
TORCH = {"queues run", "queues sweep", "queues run-priority", "program run", "doctor"}
PRINTS = sorted(EXAMPLES.keys() - STARTS_PROCESSES - NOTHING_PRINTED)
LINES_AHEAD = (
    "0 GPUs: two ranks on the CPU, over gloo",
    "ab: interrupted; run the same command again to continue",
    "sweep: interrupted; run the same command again to continue",
)
"""What a command says anyway, and where it goes on."""
CALLS_BEFORE_INTERRUPT = 3


def test_every_command_has_an_example() -> None:
    assert EXAMPLES.keys() == JSON.keys() | NO_RESULTS | ELSEWHERE


@contextmanager
def closed_pipe() -> Iterator[TextIO]:
    """A stream whose reader has gone away."""
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    try:
        yield stream
    finally:
        stream.close()  # raises BrokenPipeError where anything is left that the interpreter would flush


def exit_code_of(arguments: tuple[str, ...]) -> Any:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments), prog_name="aorta")
    return ending.value.code


CUT_NUMBER = re.compile(r"\d…")


@pytest.mark.parametrize("name", [name for name in sorted(set(PRINTS) - TORCH) if "project" not in name])
def test_no_number_is_cut_at_80_columns(name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*EXAMPLES[name]).stdout.splitlines()
    assert lines
    assert not [line for line in lines if CUT_NUMBER.search(line)]


def marked(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.heavy) if name in TORCH else name for name in names]


@pytest.mark.parametrize("name", marked(PRINTS))
def test_a_reader_that_goes_away_ends_a_command_quietly(
    name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert exit_code_of(EXAMPLES[name]) in (FINE, None)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        pytest.param(("report", "fsdp", *QUIET, "--budget", "budget.yaml"), VIOLATED, id="budget"),
        pytest.param(("compare", "ddp", "fsdp", *QUIET, "--budget", "budget.yaml"), VIOLATED, id="two-runs"),
        pytest.param(("program", "lint", "race.txt"), VIOLATED, id="lint"),
        pytest.param(
            ("queues", "compare", "--baseline", "queues.json", "--test", "queues.json"), None, id="queues"
        ),
    ],
)
def test_a_verdict_is_the_exit_code_though_nobody_reads_it(
    arguments: tuple[str, ...],
    exit_code: int | None,
    inputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As of grep: `aorta report RUN --budget B | head -1` under pipefail still fails."""
    (inputs / "budget.yaml").write_text("step_ms: {max: 0.000001}\n")
    emitted = ("program", "emit", "--fork", "none", "--tiles", "4", "--streams", "2")
    (inputs / "race.txt").write_text(run(*emitted).output)
    expected = run(*arguments).exit_code
    assert exit_code is None or expected == exit_code
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert exit_code_of(arguments) == expected
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("words", [(), *((name,) for name in main.list_commands(None))])  # type: ignore[arg-type]
def test_a_reader_that_goes_away_from_a_help_is_no_error(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert exit_code_of((*words, "--help")) == FINE


def test_a_mistake_that_nobody_reads_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`2>&1 | head`: both streams are the pipe."""
    with closed_pipe() as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert exit_code_of(("report", "nowhere")) == 2


@contextmanager
def interrupted_within_aorta() -> Iterator[list[str]]:
    """Ctrl-C at a call of one of aorta's functions beyond the command line's own; the list names it."""
    home, places = str(Path(aorta.__file__).parent), list[str]()
    ahead = CALLS_BEFORE_INTERRUPT

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal ahead
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(home) or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith((f"{home}/cli/", f"{home}/command_line.py")):
            return
        ahead -= 1
        if ahead <= 0:
            sys.setprofile(None)
            places.append(f"{code.co_filename}:{code.co_name}")
            raise KeyboardInterrupt

    sys.setprofile(watch)
    try:
        yield places
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", marked(sorted(EXAMPLES)))
def test_an_interrupt_ends_a_command_quietly(
    name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def wait_for(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", wait_for)
    with interrupted_within_aorta():
        assert exit_code_of(EXAMPLES[name]) == INTERRUPTED
    assert capfd.readouterr().err.strip() in ("", *LINES_AHEAD)


@pytest.mark.parametrize("command", [("-m", "aorta", "report"), ("analysis/overlap_report.py",)])
def test_a_process_whose_reader_goes_away(runs: Path, command: tuple[str, ...]) -> None:
    arguments = [str(runs / "fsdp")] if "report" in command else [
        "--log-dir", str(runs / "fsdp"), "--label", "a", "--output", str(runs / "out")]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *command, *arguments, *QUIET],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (FINE, b"")


def test_a_process_that_is_interrupted(tmp_path: Path) -> None:
    """`aorta run` while its command runs: Ctrl-C goes to both, and the command's ending is its exit code."""
    command = ("sh", "-c", "echo began; exec sleep 600")
    process = subprocess.Popen(
        [sys.executable, "-m", "aorta", "run", "-o", str(tmp_path), "--", *command],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in errors


@pytest.mark.processes
def test_a_pipe_that_breaks_after_the_command_leaves_its_exit_code(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report at the end of `aorta run` is read by nobody; the command has failed."""

    def conclude(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("aorta.cli.run._conclude", conclude)
    assert exit_code_of(("run", "-o", "recorded", "--", "sh", "-c", "exit 7")) == 7


@pytest.mark.heavy
def test_a_program_of_one_step_in_one_process_has_its_step(tmp_path: Path) -> None:
    """No second step and no end of a process group tells where it ends: only the interpreter's exit does."""
    script = tmp_path / "one_step.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(4, 8)).sum().backward()\n"
        "optimizer.step()\n"
    )
    recorded = ["aorta", "run", "--no-report", "-o", tmp_path / "run"]
    done = run_python("-m", *recorded, "--", sys.executable, script, PYTHONPATH=str(ROOT))
    assert done.returncode == FINE
    assert done.stderr.startswith("aorta: rank 0: 1 step recorded, steps at torch.optim.sgd.SGD.step")
    assert len((tmp_path / "run" / "rank_0_metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.heavy
def test_a_program_that_runs_out_of_memory_ends_with_who_held_it(tmp_path: Path) -> None:
    script = tmp_path / "keeps.py"
    script.write_text(
        "import gc, resource, torch\n"
        "model = torch.nn.Linear(10, 1000)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "predictions = []; gc.freeze()\n"  # as some programs do once all is made
        "for step in range(200):\n"
        "    if step == 3:\n"
        "        size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (size + (256 << 20),) * 2)\n"
        "    output = model(torch.ones(5000, 10))\n"  # 20 MB
        "    output.mean().backward()\n"
        "    optimizer.step()\n"
        "    predictions.append(output.detach())\n"
    )
    recorded = ["aorta", "run", "-o", tmp_path / "run"]
    done = run_python("-m", *recorded, "--", sys.executable, script, PYTHONPATH=str(ROOT))
    assert done.returncode == 1  # the program's own
    said = " ".join((done.stdout + done.stderr).split())
    assert re.search(
        r"out of memory on rank 0 in step \d+, in the (for|back)ward pass, at keeps.py:(9|10)", said
    )
    assert re.search(r"held: \d+\.\d MiB \((\d\d|100) %\) \d+ tensors in predictions \(keeps.py:12\)", said)
    assert "change: let go of what predictions (keeps.py:12) keeps" in said


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a device of Linux")
@pytest.mark.parametrize("arguments", [["--help"], ["why", "--help"], ["doctor"]], ids=" ".join)
def test_what_a_full_disk_does_not_take_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "aorta", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.stderr == "error: not all could be written: No space left on device\n"
    assert ended.returncode == 2
