"""The program's own files, read for what records do not tell."""

import ast
import os
import time
from types import SimpleNamespace

import pytest

from aorta.why.causes.source import is_called_anew, lines_with_doubles, source_of

PROGRAM = "import torch\nTYPE = torch.float64\nx = [].double()\nnumpy.float64(3)\n"


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def record(seconds=60):
    """Of a run that begins so long from now."""
    return SimpleNamespace(started_unix_ns=time.time_ns() + int(seconds * 1e9))


def test_lines_that_ask_for_fp64(program):
    assert lines_with_doubles([str(program)], record()) == "train.py:2, train.py:3"


def test_a_file_that_was_written_since_is_not_read(program):
    assert source_of(str(program), record()) is not None
    assert source_of(str(program), record(seconds=-60)) is None


@pytest.mark.parametrize("make", [
    lambda file: file.write_text("def ("),
    lambda file: file.write_bytes(b"\0"),
    lambda file: file.write_text("a\n" * (1 << 20)),
    lambda file: (file.unlink(), os.mkfifo(file)),
    lambda file: file.unlink(),
], ids=["no-python", "binary", "large", "a-pipe", "gone"])  # fmt: skip
def test_what_is_no_program_is_left_out(program, make):
    make(program)
    assert source_of(str(program), record()) is None


@pytest.mark.parametrize(("text", "found"), [
    ("new = {name: old.state_dict()[name] for name, value in model.state_dict().items()}", True),
    ("for name, value in model.named_parameters():\n    value += old.state_dict()[name]", True),
    ("new = {name: one.state_dict() for name, one in models.items()}", False),  # of the entry
    ("new = {name: 3 for name in model.state_dict().items()}", False),  # once
    ("for step in range(9):\n    save(model.state_dict())", False),  # which has the steps
    ("for name, rate in rates.items():\n    pass\nsave(model.state_dict())", False),
])  # fmt: skip
def test_a_state_that_a_loop_asks_for_anew(text, found):
    assert is_called_anew(ast.parse(text), text.count("\n") + 1, "state_dict") == found
