"""Something to read for every command."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from aorta.account.results.schema import write_document
from tests.cli.examples import ROOT, run
from tests.hang.reports_by_hand import report
from tests.queues.documents import document, point


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two small runs, in a folder with a space."""
    folder = tmp_path / "two runs"
    shutil.copytree(ROOT / "docs" / "example", folder)
    return folder


@pytest.fixture
def inputs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of every command's examples, and this process in it."""
    monkeypatch.chdir(runs)
    (runs / "program.txt").write_text(run("program", "emit", "--tiles", "4").output)
    (runs / "alone.txt").write_text(run("program", "emit", "--tiles", "4", "--ranks", "1").output)
    write_hang(runs / "stuck" / "hang")
    write_document(runs / "queues.json", document(point()))
    write_running(runs / "fsdp", runs / "running")
    return runs


def write_hang(folder: Path) -> None:
    """Reports of two ranks, of which the second is a step behind."""
    folder.mkdir(parents=True)
    for rank, num_steps in enumerate((6, 5)):
        content = msgspec.json.encode(report(rank, num_steps=num_steps))
        (folder / f"rank{rank}.json").write_bytes(content)


def write_running(ended: Path, folder: Path) -> None:
    """A run that has not ended."""
    shutil.copytree(ended, folder)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"finished_unix_ns": None}))
