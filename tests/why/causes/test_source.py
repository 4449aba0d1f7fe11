"""The program's own files, read for what records do not tell."""

import os
import time
from types import SimpleNamespace

import pytest

from aorta.why.causes.source import lines_with_doubles, source_of

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
