"""Which work keeps the workers of a DataLoader, and whether they are what a loop waits for at all."""

import re
from typing import NamedTuple

import msgspec

from aorta.account.cause import CodeLine
from aorta.account.judge.stacks import MOST
from aorta.account.judge.workers import LIMIT, LoaderWork, loader_work
from aorta.account.model import Run
from aorta.account.numbers import counted, percent
from aorta.records.stacks import StackFrame
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.rules import instead_of
from aorta.why.causes.source import Piece, pieces_of_run

FREE = 0.3
"""Workers that fetch at the mean moment in which the loop waits, up to which it waits for something else."""
UNEVEN, SEVERAL = 0.5, 3
"""Part of their time up to which so many workers fetch, where a batch takes long and the others wait."""
READY = 0.3
"""Of what they fetch, from which on cores are what they lack."""
GENERAL = ("torch", "python", "")
"""Packages whose functions tell less than those that call them; '' of functions without frames."""
GENERATORS = re.compile(r"(?:\w+\.)*(?:default_rng|Generator|RandomState|Random|SystemRandom)\(")
"""Calls that make a generator of the program's own, whose state nobody looks at."""


class WorkersTold(NamedTuple):
    origin: str
    """Of the remedy: fetching, waiting (within that), uneven, handing or idle."""
    line: CodeLine | None
    facts: dict[str, str]
    evidence: list[str]
    work: LoaderWork | None = None
    """Where it tells the line."""


def told_by_workers(finding: CauseFinding, judged: Run, stack: frozenset[str]) -> WorkersTold | None:
    """None where they were not sampled while the loop waited, or what they did then is not clear."""
    is_meant = finding.kind == "data_loading" and "workers" in stack
    if not is_meant or finding.facts.get("origin") == "pieces" or finding.facts.get("op") == "workers_new":
        return None
    work = loader_work(judged, finding.rank if len(judged.ranks) > 1 else None)
    if work is None:
        return None
    make = f"{work.num_workers:,} workers make" if work.num_workers > 1 else "only worker makes"
    text = (
        f"the loader's {make} batches in {percent(work.fetches)} of the time in which the loop waits for one"
    )
    if work.num_fetching < FREE:
        is_handing = work.hands_over * work.num_workers >= LIMIT
        does = "pickling or sending one" if is_handing else "waiting for work"
        evidence = [f"{text}, {does} in {percent(work.hands_over if is_handing else work.waits)}"]
        return WorkersTold("handing" if is_handing else "idle", None, {}, evidence)
    if not work.is_limit:
        return None
    pieces = pieces_of_run(judged)
    function, made = _function(work, pieces)
    line = work.line or made
    samples = f"({counted(len(work.stacks), 'sample')})"
    evidence = [f"{text}{_most_of_it(work, function, made)} {samples}"]
    if work.lacks_cores >= READY:
        evidence.append(f"in {percent(work.lacks_cores)} of that they could run and have no core")
    elif work.sleeps >= MOST:
        evidence.append(f"in {percent(work.sleeps)} of that they wait: for files, for others, for a lock")
    is_special = function is not None and (line is None or function.file not in GENERAL)
    what = "__getitem__" if line is None else line.text
    what = function.text if function is not None and is_special else what
    facts = {"at_line": "" if line is None or what == line.text else f": at {line.text}"}
    facts |= {} if line is None else {"line": line.text}
    functions = [*([] if function is None else [function]), *reversed(work.functions)]
    called = [one.text for one in functions] + ([work.line.entry, work.line.calls] if work.line else [])
    instead = instead_of((*filter(None, called),), finding.kind, stack)
    if instead is not None and line is not None:
        facts["at_line"] = f": at {line.text}"
    draws = None if any(GENERATORS.match(one.text) for one in pieces) else work.draws
    facts["instead"] = instead.set if instead is not None else _kept(what, draws)
    facts["move"] = facts["instead"] + facts["at_line"]
    # Its time is the workers', and none of the thread that trains.
    line = None if line is None else msgspec.structs.replace(line, ms=0.0, num_samples=0)
    origin = "waiting" if work.sleeps >= MOST else "fetching"
    if work.fetches < UNEVEN and work.num_workers >= SEVERAL:
        origin = "uneven"
    return WorkersTold(origin, line, facts, evidence, work)


def _kept(what: str, draws: bool | None) -> str:
    """What to do with work that no row of calls.yaml knows."""
    if draws is False:
        return (
            f"compute once for each sample what {what} gives, before training or in a first epoch, and keep"
            " it: no random numbers of torch, numpy or Python were drawn for the batches that were looked at"
        )
    return (
        f"compute before training what of {what} draws nothing at random, and the rest for a whole batch in"
        " one call"
    )


def _most_of_it(work: LoaderWork, function: StackFrame | None, made: CodeLine | None) -> str:
    """'; 83 % of that is in Walk.forward of graphs, called from Rows.get(), data.py:31'"""
    line = work.line
    if function is not None:
        called = f", named in {made.text}" if made is not None else ""
        called = called if line is None else f", called from {line.text}"
        return f"; {percent(work.part_in(function))} of that is in {function.text}{called}"
    if line is None:
        return "; most of that is in no single function"
    called = f", called from {line.caller}" if line.caller else ""
    return f"; {percent(line.part)} of that is in {line.text}{called}"


def _function(work: LoaderWork, pieces: list[Piece]) -> tuple[StackFrame | None, CodeLine | None]:
    """Of functions of libraries that most is in, the innermost that the program's source names, and where it
    does, if no line of the program calls it; else the innermost one of a package that is not GENERAL."""
    library = [one for one in work.functions if not one.is_program]
    for frame in reversed(library):
        name = frame.outer_function.partition(".")[0]
        at = {one.at for one in pieces if re.match(rf"(?:\w+\.)*{re.escape(name)}\(", one.text)}
        if at and not name.startswith("_"):
            place = None if work.line is not None or len(at) > 1 else at.pop()
            if place is None:
                return frame, None
            line = CodeLine(file=place.file, line=place.line, function=place.function, text=place.text)
            return frame, line
    special = [one for one in library if one.file not in GENERAL]
    return next(iter([*special[::-1], *library[::-1]]), None), None
