"""Arguments of libraries that causes come of: what a trainer does for its argument runs in the line that
calls the trainer, and is mended where the argument stands."""

import ast
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from aorta.account.cause import Cause, CauseKind, CodeLine
from aorta.account.model import Run, once_of_run
from aorta.records.stacks import StackFrame
from aorta.why.causes.program import program_of, settings_text
from aorta.why.causes.rules import rules
from aorta.why.causes.source import Piece, pieces_of_run
from aorta.why.causes.text import filled

TRAINS, MAKES = ("train", "fit"), ("train", "fit", "prepare")
"""Methods of trainers: that train, and in which these make loaders, wrappers and optimizers of their own."""
UNLESS_SET = "unless it is set otherwise"
"""Said of a default where not all arguments are known."""


class ArgumentRemedy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to set instead of an argument, for the remedy of a cause that comes of it."""

    of: list[str]
    """Patterns of what takes it, by the name that it is imported by: 'transformers.*TrainingArguments'."""
    arguments: list[str]
    """The first of them that the program has set counts."""
    kinds: list[CauseKind]
    set: str
    """With {written} ('save_steps=5'), {at} (its line) and {call} ('TrainingArguments(...)')."""
    remedy: str = ""
    """A pattern of the remedy that it stands for; '' of any."""
    calls: list[str] = []
    """Patterns of the cause's function, or of a library's that its line is in; empty: of any line. trainer:
    of a line that no sample shows, and that calls train() or fit()."""
    site: str = ""
    """What a trainer must have made, of the facts of program_of: 'loader_site'."""
    fine: str = ""
    """A pattern of values that have no such loss."""
    default: str = ""
    """The value that it has where it is not set, if that has the loss as well: told with the call's line."""


class Argument(NamedTuple):
    value: str
    at: StackFrame


class LibraryCall(NamedTuple):
    name: str
    """'transformers.TrainingArguments'"""
    at: StackFrame
    arguments: dict[str, Argument]
    is_whole: bool
    """Whether all of its arguments are known: none comes out of a mapping that is made elsewhere."""


@cache
def argument_remedies() -> list[ArgumentRemedy]:
    from aorta.config.yaml_files import read_structs

    return read_structs(Path(__file__).with_name("arguments.yaml"), list[ArgumentRemedy])


def told_by_argument(cause: Cause, judged: Run) -> Cause:
    """The cause at the line of the argument that it comes of, and what to set there; as it is without one."""
    line = cause.line
    function = "" if line is None else line.function
    names: tuple[str, ...] = () if line is None else (f"{function}()", line.entry, line.calls)
    if line is not None and not line.entry:  # no sample tells what it calls
        names += ("trainer",) * _calls_one_of(TRAINS, f"{Path(line.file).name}:{line.line}", judged)
    for remedy in argument_remedies():
        if cause.kind not in remedy.kinds or not re.search(remedy.remedy, cause.change):
            continue
        if remedy.calls and not any(fnmatchcase(name, each) for name in names for each in remedy.calls):
            continue
        if remedy.site and not _calls_one_of(MAKES, program_of(judged.noted)[1].get(remedy.site), judged):
            continue
        if (found := _found(remedy, line, judged)) is None:
            continue
        name, call, argument, source = found
        facts = {
            "written": f"{name}={argument.value}" + ("" if source == "set" else f" ({source})"),
            "at": argument.at.text,
            "call": f"{call.rpartition('.')[2].lstrip('*')}(...)",
        }
        used = "" if line is None else f" in {line.text}"
        place = f", {'set' if source == 'set' else 'left to ' + facts['call']} in {argument.at.text}"
        before, there, behind = cause.subject.partition(used) if used else (cause.subject, "", "")
        subject = before + place + (f", used{there}" if there else "") + behind
        at = argument.at
        return msgspec.structs.replace(
            cause,
            subject=subject,
            change=settings_text(rules()[cause.kind].settings, judged) + filled(remedy.set, facts),
            line=CodeLine(file=at.file, line=at.line, function=at.function, text=at.text),
        )
    return cause


def _found(
    remedy: ArgumentRemedy, line: CodeLine | None, judged: Run
) -> tuple[str, str, Argument, str] | None:
    """The argument, what takes it, its value and who says so: the one call that sets it to what loses time,
    or leaves it so; None of several. A program that shows no call, as where a command's options make it, has
    the default at the line that calls the trainer."""
    calls = [one for one in library_calls(judged) if any(fnmatchcase(one.name, each) for each in remedy.of)]
    for name in remedy.arguments:
        if set_in := [one for one in calls if name in one.arguments]:
            lossy = [one for one in set_in if not re.fullmatch(remedy.fine, one.arguments[name].value)]
            return (name, lossy[0].name, lossy[0].arguments[name], "set") if len(lossy) == 1 else None
    if not remedy.default or len(calls) > 1:
        return None
    name = remedy.arguments[0]
    if calls:
        source = "the default" if calls[0].is_whole else UNLESS_SET
        return name, calls[0].name, Argument(remedy.default, calls[0].at), source
    if line is None or not remedy.calls:
        return None
    at = StackFrame(line.file, line.line, line.function, True)
    return name, remedy.of[0], Argument(remedy.default, at), UNLESS_SET


def _calls_one_of(methods: tuple[str, ...], site: str | None, judged: Run) -> bool:
    """Whether a line ('train.py:7') calls such a method: as in stacks, the one with the method's name."""
    return any(
        isinstance(one.node, ast.Call)
        and isinstance(one.node.func, ast.Attribute)
        and one.node.func.attr in methods
        and f"{Path(one.at.file).name}:{one.node.func.end_lineno}" == site
        for one in pieces_of_run(judged)
    )


# ---- calls of libraries in the program's source ----------------------------------------------------------


@once_of_run
def library_calls(judged: Run) -> list[LibraryCall]:
    return calls_in(pieces_of_run(judged))


def calls_in(found: list[Piece]) -> list[LibraryCall]:
    """Of functions and classes of libraries, of those that the program derives from them as well."""
    by_file: dict[str, list[Piece]] = defaultdict(list)
    for piece in found:
        by_file[piece.at.file].append(piece)
    return [call for pieces in by_file.values() for call in _File(pieces).calls()]


class _File:
    """What a file's names stand for, as far as its text tells."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._at = {id(one.node): one.at for one in pieces}
        self._imported: dict[str, str] = {}
        self._fields: dict[str, dict[str, Argument]] = defaultdict(dict)
        self._assigned: dict[str, list[ast.expr]] = defaultdict(list)
        """By a name, or a name's attribute or entry: 'args.save_steps'."""
        for node in (one.node for one in pieces):
            match node:
                case ast.Import():
                    for one in node.names:
                        self._imported[one.asname or one.name.partition(".")[0]] = (
                            one.name if one.asname else one.name.partition(".")[0]
                        )
                case ast.ImportFrom(module=str(module)):
                    self._imported |= {one.asname or one.name: f"{module}.{one.name}" for one in node.names}
                case ast.Assign(targets=[target]) | ast.AnnAssign(target=target, value=ast.expr()):
                    self._assigned[self._target(target)].append(node.value)  # type: ignore[arg-type]
        for node in (one.node for one in pieces if isinstance(one.node, ast.ClassDef)):
            bases = [base for each in node.bases if (base := self._name(each))]
            if bases:
                self._imported[node.name] = bases[0]
            for field in (one for one in node.body if isinstance(one, ast.AnnAssign) and bases):
                if isinstance(field.target, ast.Name) and field.value is not None:
                    value = Argument(self._value(field.value), self._at[id(field)])
                    self._fields[node.name][field.target.id] = value

    def calls(self) -> list[LibraryCall]:
        found = []
        for piece in self._pieces:
            if isinstance(piece.node, ast.Call) and (name := self._name(piece.node.func)):
                arguments, is_whole = self._arguments(piece.node)
                found.append(LibraryCall(name, piece.at, arguments, is_whole))
        return found

    def _name(self, node: ast.expr) -> str:
        """'transformers.TrainingArguments'; '' of what is not imported."""
        first, _, rest = ast.unparse(node).partition(".")
        known = self._imported.get(first)
        return "" if known is None else f"{known}.{rest}".rstrip(".")

    def _target(self, node: ast.expr) -> str:
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(entry))):
                return f"{ast.unparse(node.value)}.{entry}"
        return ast.unparse(node)

    def _value(self, node: ast.expr) -> str:
        """As it is written; of a name that is a constant, this."""
        assigned = self._assigned.get(node.id, []) if isinstance(node, ast.Name) else []
        is_constant = len(assigned) == 1 and isinstance(assigned[0], ast.Constant)
        return ast.unparse(assigned[0] if is_constant else node)

    def _arguments(self, call: ast.Call) -> tuple[dict[str, Argument], bool]:
        found = dict(self._fields.get(ast.unparse(call.func), {}))
        is_whole = True
        for keyword in call.keywords:
            if keyword.arg is not None:
                found[keyword.arg] = Argument(self._value(keyword.value), self._at[id(keyword)])
                entries, _ = self._entries(keyword.value)  # accelerator_config={"dispatch_batches": True}
                found = entries | found
            else:
                entries, is_known = self._entries(keyword.value)
                found |= entries
                is_whole &= is_known
        targets = {name for name, values in self._assigned.items() if call in values}
        for name, values in self._assigned.items():  # args.save_steps = 5
            owner, _, attribute = name.rpartition(".")
            if owner in targets:
                found[attribute] = Argument(self._value(values[-1]), self._at[id(values[-1])])
        return found, is_whole

    def _entries(self, node: ast.expr) -> tuple[dict[str, Argument], bool]:
        """Of a dict, a call of dict(), or a name that is one; and whether these are all."""
        if isinstance(node, ast.Name) and len(values := self._assigned.get(node.id, [])) == 1:
            entries, is_known = self._entries(values[0])
            for name, others in self._assigned.items():
                if name.startswith(f"{node.id}."):
                    at = self._at[id(others[-1])]
                    entries[name.partition(".")[2]] = Argument(self._value(others[-1]), at)
            return entries, is_known
        if isinstance(node, ast.Dict):
            pairs = [*zip(node.keys, node.values, strict=True)]
            entries = {
                str(key.value): Argument(self._value(value), self._at[id(key)])
                for key, value in pairs
                if isinstance(key, ast.Constant)
            }
            return entries, len(entries) == len(pairs)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return self._arguments(node)
        return {}, False
