"""The program's source, as it was when the run began."""

import ast
from collections.abc import Iterable
from pathlib import Path

from aorta.files import read_regular
from aorta.records.schema import RunRecord
from aorta.records.stacks import StackFrame

MOST_BYTES = 1 << 20
MOST_LINES = 3


def source_of(file: str, record: RunRecord | None) -> ast.Module | None:
    """None where it is gone, was written since, or is none."""
    try:
        is_same = record is not None and Path(file).stat().st_mtime_ns <= record.started_unix_ns
        return ast.parse(read_regular(file, MOST_BYTES)) if is_same else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def lines_with_doubles(files: Iterable[str], record: RunRecord | None) -> str:
    """'train.py:24, train.py:81', where these name torch.float64, or call double(); '' where none does."""
    found = []
    for file in sorted({*files}):
        tree = source_of(file, record)
        named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)] if tree else []
        numbers = {
            node.lineno
            for node in named
            if node.attr == "double" or (node.attr == "float64" and ast.unparse(node.value) == "torch")
        }
        found += [StackFrame(file, number, "<module>", True).text for number in sorted(numbers)]
    return ", ".join(found[:MOST_LINES]) + (", and others" if len(found) > MOST_LINES else "")
