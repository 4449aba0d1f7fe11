"""Lines of the program's source in which what a cause is of was made or set: samples show what runs, and not
what to change. By syntax, of files that are as they were when the run began."""

import ast
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aorta.account.cause import CodeLine
from aorta.account.judge.sites import sites_of
from aorta.account.judge.stacks import samples_of_ranks
from aorta.account.model import Run, once_of_run
from aorta.files import read_regular
from aorta.records.schema import RunRecord
from aorta.records.stacks import StackFrame

MOST_FILES = 64
MOST_BYTES = 1 << 20
MOST_LINES = 3
ForLoop = ast.For | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Loop = ForLoop | ast.While
OF_TENSORS = re.compile(r"(items|keys|values|parameters|named_\w+|buffers|state_dict)\(")
"""What loops over the tensors of a model go through, and no loop of steps does."""
CONVERTS = frozenset(
    ("from_numpy", "as_tensor", "tensor", "int", "float", "long", "to", "clone", "copy", "astype")
)
"""Functions and methods that a row needs no more of than many rows do."""
OF_STEPS = {"backward", "step", "zero_grad"}
"""Methods that the loop of steps calls."""
QUIET = re.compile(r"no_grad|inference_mode")
OF_OBJECTS = re.compile(r"(?:gather_object|_object_list)$")
"""Collectives of torch.distributed."""
COLLATE = ("collate_fn", "data_collator")
ASSIGNS = re.compile(r"(?:self\.)?(\w+)(?: *:[^=]+)? *=(?!=)")
FILLS = re.compile(r"[\w.]*\b(zeros|ones|full|empty|pad|pad_sequence|new_\w+)\(|\[[\w.]+\] \* ")
MAKES_CONSTANTS = re.compile(r"torch\.(tensor|as_tensor|arange|linspace|zeros|ones|full|eye)")
"""Functions that make a tensor of numbers of the host's, where they are not told another device."""


class Piece(NamedTuple):
    text: str
    """Of an expression, a statement or an argument, to the end of its first line."""
    at: StackFrame
    lines: range
    node: ast.AST


class Source(NamedTuple):
    tree: ast.Module
    text: bytes


def source_of(file: str, record: RunRecord) -> Source | None:
    """None where it is gone, was written since, or is none."""
    try:
        if Path(file).stat().st_mtime_ns > record.started_unix_ns:
            return None
        text = read_regular(file, MOST_BYTES)
        with warnings.catch_warnings(action="ignore"):  # of escapes in the program's texts
            return Source(ast.parse(text), text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@once_of_run
def pieces_of_run(judged: Run) -> list[Piece]:
    files = [*filter(os.path.isabs, judged.noted.command[:1])]
    samples = samples_of_ranks(judged.whole)
    files += [frame.file for one in samples for frame in one.stacks.frames if frame.is_program]
    files += [row.file for row in sites_of(judged) if row.is_program]
    return pieces_of(files, judged.noted)


def pieces_of(files: list[str], record: RunRecord) -> list[Piece]:
    """Of these files, and of those beside them that they import; in their order."""
    found: list[Piece] = []
    paths = [*dict.fromkeys(files)][:MOST_FILES]
    for path in paths:  # grows
        if (source := source_of(path, record)) is not None:
            pieces = sorted(_pieces(path, source), key=lambda one: one.at.line)
            imports = [re.match(r"(?:from|import) ([\w.]+)", one.text) for one in pieces]
            beside = [Path(path).parent / f"{one[1].replace('.', '/')}.py" for one in imports if one]
            more = [str(file) for file in dict.fromkeys(beside) if file.is_file() and str(file) not in paths]
            paths += more[: MOST_FILES - len(paths)]
            found += pieces
    return found


def _pieces(file: str, source: Source) -> Iterator[Piece]:
    lines = source.text.splitlines()
    inside: list[tuple[str, ast.AST]] = [("", source.tree)]
    while inside:
        function, node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.expr | ast.stmt | ast.keyword) and node.lineno <= len(lines):
            text = lines[node.lineno - 1][node.col_offset :].decode(errors="replace")
            at = StackFrame(file, node.lineno, function or "<module>", True)
            yield Piece(text, at, range(node.lineno, (node.end_lineno or node.lineno) + 1), node)
        inside += [(function, child) for child in ast.iter_child_nodes(node)]


def made_in(pieces: list[Piece], key: str, begins: str, line: CodeLine | None) -> str:
    """'Ranker.__init__(), train.py:32 and train.py:33', where pieces begin so; '' of more than MOST_LINES and
    of the line that runs."""
    found = [one for one in pieces if re.match(begins, one.text)]
    assigned = [] if line is None else _assigned(line, found, pieces)
    found = assigned or ([] if key == "unread" else found)
    if key == "padding" and not found:
        found = _fills(pieces)
    at = [*dict.fromkeys(one.at for one in found)]
    is_known = line is not None and (line.file, line.line) in [(one.file, one.line) for one in at]
    names = [one.text if one is at[0] else f"{Path(one.file).name}:{one.line}" for one in at]
    return "" if is_known or len(at) > MOST_LINES else " and ".join(names)


def module_made_in(module: str, pieces: list[Piece]) -> str:
    """As made_in, where a module is made whose class is the program's, or that is 'Probe.trunk' in one."""
    owner, _, name = module.partition(".")
    if not any(isinstance(one.node, ast.ClassDef) and one.node.name == owner for one in pieces):
        return ""
    return made_in(pieces, "", rf"self\.{name} *(:[^=]+)?=(?!=)" if name else rf"(\w+\.)*{owner}\(", None)


def _fills(pieces: list[Piece]) -> list[Piece]:
    """The first tensor that a collate function makes, or without such a function a data set for a sample."""
    names = set[str]()
    for one in pieces:
        if isinstance(one.node, ast.keyword) and one.node.arg in COLLATE:
            names |= {*_names(one.node.value), ast.unparse(one.node.value).rpartition(".")[2]}
    for one in pieces:  # what it was made from
        if isinstance(one.node, ast.Assign) and names & {*map(ast.unparse, one.node.targets)}:
            names |= {*_names(one.node.value)}
    of_them = [
        one
        for one in pieces
        if (path := one.at.function.split("."))[-1] in names
        or (path[-1] == "__call__" and path[0] in names)
        or (path[-1] == "__getitem__" and not names)
    ]
    filled = [one for one in of_them if FILLS.match(one.text)]
    return (filled or (of_them if names else []))[:1]


def _assigned(line: CodeLine, found: list[Piece], pieces: list[Piece]) -> list[Piece]:
    """What assigns one of them to what the line uses: an attribute, in its class, or a name."""
    used, assigned = set(), []
    for one in (one for one in pieces if one.at.file == line.file):
        used |= {*re.findall(r"\w+", one.text)} if one.at.line == line.line else set()
        is_seen = one.at.function.partition(".")[0] in (line.function.partition(".")[0], "<module>")
        if is_seen and (target := ASSIGNS.match(one.text)):
            assigned += [
                (target[1], one) for each in found if each.at.line in one.lines and each.at.file == line.file
            ]
    return [one for name, one in assigned if name in used]


def is_called_anew(tree: ast.Module, line: int, name: str) -> bool:
    """Whether a loop over tensors calls a method in this line for each of them, with nothing of it."""
    for loop in (node for node in ast.walk(tree) if isinstance(node, ForLoop)):
        over = _over(loop)
        entry, before = {*_names(over.target)}, {*ast.walk(over.iter)}
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call) and node not in before]
        named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == name]
        there = [call for call in named if call.lineno <= line <= (call.end_lineno or 0)]
        if OF_TENSORS.search(ast.unparse(over.iter)) and any(not entry & {*_names(call)} for call in there):
            return True
    return False


def goes_through(tree: ast.Module, line: int) -> str:
    """What the innermost loop around this line goes through: tensors of a model, entries, those of loops
    within loops, or nothing but the same again, so many times. '' without."""
    loops = loops_around(tree, line)
    for loop in loops[-1:]:
        over = loop.test if isinstance(loop, ast.While) else _over(loop).iter
        if OF_TENSORS.search(ast.unparse(over)):
            return "tensors"
        if isinstance(loop, ast.For) and _counts(loop) and _hands_on(loop):
            return "again"
        return "nested" if len(loops) > 1 else "entries"
    return ""


def loops_around(tree: ast.Module, line: int, of_steps: bool = False) -> list[Loop]:
    """The outermost first; that of steps, which calls backward or an update, is none, or is what is asked
    for. One within it that calls step() alone, as of a simulator, is none of steps."""
    found: list[Loop] = []
    has_passes = False
    for loop in (node for node in ast.walk(tree) if isinstance(node, Loop)):
        if loop.lineno <= line <= (loop.end_lineno or 0):
            called = {node.attr for node in ast.walk(loop) if isinstance(node, ast.Attribute)} & OF_STEPS
            is_of_steps = bool(called - {"step"} if has_passes else called)
            has_passes |= "backward" in called
            found += [loop] if is_of_steps == of_steps else []
    return found


def rounds_around(tree: ast.Module, line: int) -> Loop | None:
    """The loop within a step, of numbered rounds or until something is so, that goes on without gradients."""
    loops = [one for one in loops_around(tree, line) if isinstance(one, ast.While) or _counts(one)]
    apart = [node for node in ast.walk(tree) if isinstance(node, ast.With | ast.FunctionDef)]
    heads = [(node, node.items if isinstance(node, ast.With) else node.decorator_list) for node in apart]
    quiet = [node for node, head in heads if any(QUIET.search(ast.unparse(one)) for one in head)]
    for loop in loops:
        for node in quiet:
            around, inside = (node, loop) if node.lineno < loop.lineno else (loop, node)
            if around.lineno <= inside.lineno <= (around.end_lineno or 0):
                return loop
    return None


def _hands_on(loop: ast.For) -> bool:
    """Whether a round does not ask for its number, and begins with what the round before it has come to."""
    begins_with, made = set[str](), set[str]()
    for node in loop.body:
        names = [one for one in ast.walk(node) if isinstance(one, ast.Name)]
        begins_with |= {one.id for one in names if isinstance(one.ctx, ast.Load)} - made
        made |= {one.id for one in names if isinstance(one.ctx, ast.Store) and not _is_sum(node)}
    return bool(begins_with & made) and not begins_with.intersection(_names(loop.target))


def _is_sum(node: ast.stmt) -> bool:
    """total += x, or total = total + x, of which the round asks for nothing else."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.AugAssign)
    (target, *_), value = node.targets, node.value
    return (
        isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.Add)
        and ast.unparse(value.left) == ast.unparse(target)
        and not {*_names(target)} & {*_names(value.right)}
    )


def _counts(loop: ForLoop) -> bool:
    return ast.unparse(_over(loop).iter).startswith("range(")


def _over(loop: ForLoop) -> ast.For | ast.comprehension:
    return loop if isinstance(loop, ast.For) else loop.generators[0]


def indexes_alone(tree: ast.Module, line: int) -> bool:
    """Whether a statement in this line indexes by names and calls nothing."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno == line]
    nodes = [node for one in found for node in ast.walk(one)]
    by_name = any(isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) for node in nodes)
    return by_name and not any(isinstance(node, ast.Call | ast.For | ast.While) for node in nodes)


def asks(tree: ast.Module, line: int) -> bool:
    """Whether a line decides by what it computes: an assertion, a condition, any() or all() of it, not along
    a dimension: that tells which rows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.If | ast.IfExp | ast.While):
            part: ast.expr = node.test
        elif isinstance(node, ast.Call) and _is_of_all(node):
            part = node
        else:
            continue
        if part.lineno <= line <= (part.end_lineno or 0):
            return True
    return False


def _is_of_all(call: ast.Call) -> bool:
    """x.any(), torch.any(x), any(x): of all entries."""
    owner, _, name = ast.unparse(call.func).rpartition(".")
    num_given = len(call.args) + len(call.keywords)
    return name in ("any", "all") and num_given == (owner in ("", "torch", "np", "numpy"))


def gives_rows(tree: ast.Module, name: str) -> bool:
    """Whether the class of this name, a data set, has a __getitem__ that only indexes: an index of many rows
    would give them as well. Pieces cut by its index, and entries that it takes apart, are none."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name]
    functions = [node for one in classes for node in one.body if isinstance(node, ast.FunctionDef)]
    for function in (one for one in functions if one.name == "__getitem__" and len(one.args.args) == 2):
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        index = function.args.args[1].arg
        called = {ast.unparse(node.func).rpartition(".")[2] for node in nodes if isinstance(node, ast.Call)}
        cut = [one for node in nodes if isinstance(node, ast.Slice) for one in _names(node)]
        is_apart = any(
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and not isinstance(node.value, ast.Tuple)
            for node in nodes
        )
        others = Loop | ast.If | ast.IfExp | ast.With | ast.Try
        is_plain = called <= CONVERTS and {*cut} <= {"self"} and not is_apart
        indexed = [node for node in nodes if isinstance(node, ast.Subscript) and index in _names(node.slice)]
        return bool(indexed) and is_plain and not any(isinstance(node, others) for node in nodes)
    return False


def is_of_sampler(tree: ast.Module, function: str) -> bool:
    """Whether a method ('Balanced.__iter__') is of a class that is a sampler by what it inherits."""
    named = function.partition(".")[0]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == named]
    return any("Sampler" in ast.unparse(base) for one in classes for base in one.bases)


def sends_of(tree: ast.Module, line: int, of_line: int) -> bool:
    """Whether a line uses a list or an object by its name that a call in of_line sends to other ranks, or
    fills with what they send."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sends = [one for one in calls if OF_OBJECTS.search(ast.unparse(one.func))]
    there = [one for one in sends if one.lineno <= of_line <= (one.end_lineno or 0)]
    handed = [arg for one in there for arg in (*one.args, *(word.value for word in one.keywords))]
    names = {arg.id for arg in handed if isinstance(arg, ast.Name)}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.lineno == line]
    return any(node.id in names for node in used)


def hands_numbers(tree: ast.Module, line: int, function: str) -> bool:
    """Whether a call of this function in this line gives a tensor of numbers of the host's to a device, or
    makes one there: of torch.tensor(rows).to(device) the first part is work of the host."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not call.lineno <= line <= (call.end_lineno or 0):
            continue
        made, devices = call.func, [one.value for one in call.keywords if one.arg == "device"]
        if isinstance(made, ast.Attribute) and isinstance(made.value, ast.Call):  # torch.arange(n).to(device)
            if MAKES_CONSTANTS.fullmatch(ast.unparse(made.value.func)) and re.fullmatch("to|cuda", made.attr):
                return function.endswith(made.attr) and not any(
                    one.arg == "device" for one in made.value.keywords
                )
        elif ast.unparse(made) in ("torch.tensor", "torch.as_tensor") and devices:
            return ast.unparse(devices[0]).strip("'") != "cpu"
    return False


def _names(tree: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
