"""The program's source, as it was when the run began."""

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from aorta.files import read_regular
from aorta.records.schema import RunRecord
from aorta.records.stacks import StackFrame

MOST_BYTES = 1 << 20
MOST_LINES = 3
LOOPS = (ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
OF_TENSORS = re.compile(r"(items|keys|values|parameters|named_\w+|buffers|state_dict)\(")
"""What loops over the tensors of a model go through, and no loop of steps does."""


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


def is_called_anew(tree: ast.Module, line: int, name: str) -> bool:
    """Whether a loop over tensors calls a method in this line for each of them, with nothing of it."""
    for loop in (node for node in ast.walk(tree) if isinstance(node, LOOPS)):
        over = loop if isinstance(loop, ast.For) else loop.generators[0]
        entry, before = {*_names(over.target)}, {*ast.walk(over.iter)}
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and node not in before]
        named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
        there = [call for call in named if call.lineno <= line <= (call.end_lineno or 0)]
        if OF_TENSORS.search(ast.unparse(over.iter)) and any(not entry & {*_names(call)} for call in there):
            return True
    return False


def _names(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
