"""aorta gate: blessing, exit codes, history and its page; what is no baseline."""

import json
import zipfile
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from aorta.account.results.baseline import HistoryLine, baseline_runs, read_history
from aorta.cli import main
from aorta.cli.gate import gate_command
from aorta.config.yaml_files import read_yaml
from aorta.errors import AortaError
from aorta.page.history import history_page
from tests.records.run_folders import noisy_run

ROOT = Path(__file__).resolve().parents[2]


def gate(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["gate", *map(str, arguments)])


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs of a program, three of one that takes as long, three that take 10 % more."""
    for name, slowdown in (("a", 1.0), ("b", 1.0), ("slow", 1.1)):
        for number in range(3):
            seed = number + 10 * (name != "a")
            noisy_run(tmp_path / f"{name}{number}", 20, slowdown=slowdown, seed=seed)
    return tmp_path


def changed(folder: Path, **fields: object) -> None:
    """run.json with other fields."""
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | fields))


def three(runs: Path, name: str) -> list[Path]:
    return [runs / f"{name}{number}" for number in range(3)]


@pytest.mark.heavy
def test_exit_codes_history_and_page(runs: Path) -> None:
    file, history = runs / "perf" / "baseline.zip", runs / "perf" / "history"
    assert gate(*three(runs, "a"), "--baseline", file).exit_code == 2
    blessed = gate(*three(runs, "a"), "--baseline", file, "--bless")
    assert (blessed.exit_code, blessed.stdout) == (0, f"blessed 3 runs: {file}\n")
    same = gate(*three(runs, "b"), "--baseline", file, "--history", history)
    assert same.exit_code == 0
    assert same.stdout.startswith("gate passed: candidate is as fast as baseline within 3 %")
    slow = gate(*three(runs, "slow"), "--baseline", file, "--history", history)
    assert slow.exit_code == 1
    assert slow.stdout.startswith("gate failed: candidate is slower than baseline")
    lines = read_history(history.with_suffix(".jsonl"))
    assert [(line.verdict, line.exit_status) for line in lines] == [("same", 0), ("worse", 1)]
    page = history.with_suffix(".html").read_text()
    assert "candidate is slower than baseline" in page
    assert "<script" not in page
    assert (runs / "slow0" / "gate" / "report.html").exists()


@pytest.mark.heavy
def test_a_short_run_and_another_device_cannot_be_told(runs: Path) -> None:
    file = runs / "baseline.zip"
    gate(*three(runs, "a"), "--baseline", file, "--bless")
    noisy_run(runs / "short", 5)
    assert gate(runs / "short", "--baseline", file).exit_code == 3
    assert gate(runs / "short", "--baseline", file, "--allow-cannot-tell").exit_code == 0
    for name in ("slow", "b"):  # faster or the same is no answer there, either
        for folder in three(runs, name):
            changed(folder, devices=[{"name": "Another GPU"}] * 2)
        other = gate(*three(runs, name), "--baseline", file)
        assert other.exit_code == 3
        assert other.stdout.startswith("gate cannot tell: other devices than the baseline's: 2 x Another GPU")


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"command": ["other.py", "--lr", "1"]},
            "another program than the baseline's: other.py, not train.py",
        ),
        ({"program": {"optimizers": [{"parameter_bytes": 900}]}}, "another model than the baseline's"),
    ],
)
def test_another_program_cannot_be_told(runs: Path, change: dict[str, object], words: str) -> None:
    for folder in (runs / "a0", runs / "b0"):
        optimizers = [{"parameter_bytes": 1000}]
        changed(folder, config=None, command=["train.py"], program={"optimizers": optimizers})
    assert gate(runs / "b0", "--baseline", runs / "a0", "--matters", "50%").exit_code == 0
    changed(runs / "b0", **change)
    other = gate(runs / "b0", "--baseline", runs / "a0", "--matters", "50%")
    assert (other.exit_code, words in other.stdout.splitlines()[0]) == (3, True)


@pytest.mark.heavy
def test_a_baseline_may_be_the_folder_of_a_run(runs: Path) -> None:
    assert gate(runs / "slow0", "--baseline", runs / "a0").exit_code == 1


def test_a_baseline_that_is_gone_keeps_no_copy(runs: Path) -> None:
    gate(*three(runs, "a"), "--baseline", runs / "b.zip", "--bless")
    with baseline_runs(runs / "b.zip") as (folders, manifest):
        assert [folder.name for folder in folders] == ["0", "1", "2"]
        assert manifest is not None
        assert manifest.runs == ["a0", "a1", "a2"]
        kept = (folders[0] / "rank_0_metrics.jsonl").read_bytes()
        assert kept == (runs / "a0" / "rank_0_metrics.jsonl").read_bytes()
    assert not folders[0].exists()


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({}, "has no baseline.json"),
        ({"baseline.json": '{"version": 9, "blessed_unix_ns": 1, "runs": []}'}, "bless it anew"),
        (
            {"baseline.json": '{"version": 1, "blessed_unix_ns": 1, "runs": ["a"]}', "../evil": "x"},
            "it holds",
        ),
        (
            {"baseline.json": '{"version": 1, "blessed_unix_ns": 1, "runs": ["a"]}', "0/.bashrc": "x"},
            "it holds",
        ),
    ],
)
def test_what_is_no_baseline_is_one_line(tmp_path: Path, members: dict[str, str], words: str) -> None:
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as packed:
        for name, text in members.items():
            packed.writestr(name, text)
    with pytest.raises(AortaError, match=words), baseline_runs(tmp_path / "b.zip"):
        pass


def test_other_files_are_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "b.zip").write_text("no zip")
    (tmp_path / "h.jsonl").write_text("[]\n")
    with pytest.raises(AortaError, match="is no baseline"), baseline_runs(tmp_path / "b.zip"):
        pass
    with pytest.raises(AortaError, match="is no history"):
        read_history(tmp_path / "h.jsonl")
    assert gate(tmp_path, "--baseline", tmp_path / "c.zip", "--bless").exit_code == 2


def test_a_page_of_nothing_and_of_what_was_not_measured() -> None:
    assert "nothing was compared yet" in history_page("x", [])
    fields = dict.fromkeys(HistoryLine.__struct_fields__)
    fields |= {"unix_ns": 0, "exit_status": 3, "verdict": "not judged", "headline": "<b>"}
    fields |= {"metric": "step_ms", "unit": "ms", "cells": {}}
    page = history_page("x", [msgspec.convert(fields, HistoryLine)])
    assert "&lt;b&gt;" in page
    assert "No ratio was measured" in page


def test_the_workflow_to_copy_is_yaml_with_these_options() -> None:
    steps = read_yaml(ROOT / "docs" / "workflows" / "performance-gate.yml")["jobs"]["gate"]["steps"]
    commands = [step.get("run", "") for step in steps]
    (command,) = [one for one in commands if one.startswith("aorta gate")]
    known = {name for option in gate_command.params for name in option.opts}
    assert {word for word in command.split() if word.startswith("--")} <= known


def test_blessing_overwrites_a_baseline_and_no_other_file(tmp_path: Path) -> None:
    run = noisy_run(tmp_path / "run")
    script, file = tmp_path / "train.py", tmp_path / "baseline.zip"
    script.write_text("print('mine')\n")
    refused = gate(run, "--baseline", script, "--bless")
    assert refused.exit_code == 2
    assert script.read_text() == "print('mine')\n"
    for _ in range(2):
        assert gate(run, "--baseline", file, "--bless").exit_code == 0
