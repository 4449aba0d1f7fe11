"""The line of the program that a cause is in, by the stacks sampled in its steps and on its rank."""

import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from aorta.account.cause import CauseKind, CodeLine
from aorta.account.judge.occasional import occasions
from aorta.account.judge.sites import SiteRow, sites_of
from aorta.account.judge.stacks import (
    FEWEST,
    MOST,
    MOST_RANKS,
    READS,
    Samples,
    WeightedStack,
    heaviest,
    innermost,
    samples_of,
    samples_of_ranks,
)
from aorta.account.load.measures import noted_program
from aorta.account.model import Run
from aorta.account.numbers import often, quantity
from aorta.records.stacks import StackFrame, StackPhase
from aorta.timeline.arrays import Flags, Ints
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses.program_code import (
    EMPTY_CACHE,
    SYNCHRONIZE,
    calls_of_spans,
    entered,
    lines_of_spans,
)
from aorta.why.causes.program import program_of

BY_CHANCE = 0.05
"""Probability of so many samples of a line in slow steps, from which on they may be there by chance."""
LEAST = 0.3
"""Of a loss, that the samples in its line must account for: fewer are of something else."""
WAITS_IN: tuple[StackPhase, ...] = ("communication", "data", "checkpoint", "evaluation")
OF_COLLECTIVES: tuple[CauseKind, ...] = (
    *("small_messages", "transfer", "wide_dtype", "no_prefetch", "shared_communicator", "bubble"),
)
"""Kinds whose line is the one that issues."""
FEWEST_OF_HOLDER = 2
"""Samples of a thread that holds the interpreter's lock, which all agree: it was seen to run there."""
THREAD_BEGINS = "Thread._bootstrap"
"""Outermost function of a thread that Python's threading has started."""
MOST_ISSUED = 3
UNKNOWN = "<unknown>"
CHECKS = re.compile(r"Distribution\.(__init__|_validate_sample)|_\w+\.check")
"""Functions of torch.distributions that look at values: without validate_args the first takes no time."""
NO_LINE = {
    *("core_taken", "clock", "imbalance", "bubble", "starved", "device_to_device", "anomaly", "blocking"),
    *("locked_out", "slowed"),
}
"""Kinds, and operations and origins of others, that no line of the program is the reason of, or none that
samples show: the host does not wait for it."""
SENDS = ("torch.to", "Tensor.to", "to", "Tensor.cuda", "cuda", "torch.as_tensor", "torch.tensor")
"""Calls that may hand values to the device, as samples name them."""
MAKE_GROUPS = ("new_group", "_new_group_with_tag", "_new_process_group_helper", "destroy_process_group")
"""Functions of torch.distributed."""
BEFORE_UPDATE = (".on_before_optimizer_step", ".on_after_backward", ".configure_gradient_clipping")
"""Methods of a LightningModule, or of a callback."""
DEALS = "DataLoaderDispatcher."
"""A class of accelerate."""
SEVERAL = 2
"""Values read a step, from which on a function may go back and forth between host and device."""
OF_PHASE: dict[CauseKind, StackPhase] = {
    "data_loading": "data",
    "checkpoint": "checkpoint",
    "optimizer": "optimizer",
    "compute": "forward",
}
"""Kinds that are a phase, or show in one."""


def tell_holder(finding: CauseFinding, judged: Run) -> None:
    """Of a finding of the interpreter's lock: the line that the thread is in which holds it, and as how many
    equal samples those are that show it. One that has just done its task shows no line any more."""
    ranks = judged.ranks[:MOST_RANKS] if finding.rank is None else [finding.rank]
    some = [one for rank in ranks if (one := samples_of(judged.whole, rank)) is not None]
    stacks = [stack for one in some for stack in one.chosen(one.is_judged & one.that("locked_out"))]
    stacks = [stack for stack in stacks if stack.ms > 0]
    if not stacks:
        return
    all_ms = sum(stack.ms for stack in stacks)
    finding.num_samples = round(all_ms**2 / sum(stack.ms**2 for stack in stacks))
    tasks = [replace(stack, frames=_task_of(stack.frames)) for stack in stacks if innermost(stack.frames)]
    line = heaviest(tasks)
    if line is not None and len(tasks) == line.num_samples >= FEWEST_OF_HOLDER and line.ms >= LEAST * all_ms:
        finding.facts["at"] = msgspec.structs.replace(line, part=line.ms / all_ms)


def _task_of(frames: list[StackFrame]) -> list[StackFrame]:
    """As far as the program's function that a thread was given; all of a stack that begins elsewhere."""
    if frames[0].function != THREAD_BEGINS:
        return frames
    return frames[: 1 + next(place for place, frame in enumerate(frames) if frame.is_program)]


class Waits(NamedTuple):
    """A call that waits for the device, in a line of the program."""

    at: StackFrame
    call: str
    num: float
    """A step, of those that take long enough to be noted."""
    ms: float


def line_of(finding: CauseFinding, judged: Run) -> CodeLine | None:
    """None where nothing was sampled, or the samples show no line with most of the loss."""
    at, op = finding.facts.get("at"), finding.facts.get("op")
    if isinstance(at, CodeLine):
        return at
    if isinstance(at, StackFrame):
        return _at(at)
    made = "ddp_site" if finding.facts.get("origin") == "bucket" else "units_site"
    if finding.kind == "small_units":
        if not (made_at := program_of(judged.noted)[1].get(made)):
            return None
        file, _, number = made_at.rpartition(":")
        return _at(StackFrame(file, int(number), UNKNOWN, True))
    if {finding.kind, op, finding.facts.get("origin")} & NO_LINE or (
        op not in (None, "loss", "weights") and finding.kind == "compute"
    ):
        return None
    ranks = judged.ranks
    if finding.rank is not None and len(ranks) > 1 and finding.rank in ranks:
        stacks = _beyond_the_others(finding, judged, finding.rank)
    else:
        several = samples_of_ranks(judged.whole)
        group = finding.facts.get("group")
        if group is not None:
            stacks = [replace(stack, ms=stack.ms / len(several)) for stack in group]
        else:
            stacks = [stack for one in several for stack in _chosen(finding, judged, one, 1 / len(several))]
    site = _issuing_most(finding, judged)
    if site is not None:
        stacks = [stack for stack in stacks if _is_in(stack, site)]
    rows = _issuing(finding, judged) if site is None else []
    if rows:
        stacks = [stack for stack in stacks if any(_is_in(stack, row) for row in rows)]
    elif (issued := _op(finding)) and site is None and sites_of(judged):
        stacks = [stack for stack in stacks if _calls(stack, issued)]
    found = heaviest(stacks)
    # A backward pass shows no line of its forward.
    least = LEAST if finding.kind != "compute" else LEAST / 3
    if op == "given_back":  # the launches behind it are what takes longer
        return found
    if op == "slow_steps" and found is not None and _may_be_chance(found, stacks, finding, judged):
        return None
    if found is None or found.num_samples < FEWEST or found.ms < least * finding.mean_ms:
        if isinstance(at := finding.facts.get("loop_at"), StackFrame):
            return _at(at)
        if finding.kind == "checkpoint":  # a rare one has few samples
            steps = _steps_of(judged)
            saving = steps[np.nan_to_num(finding.ms) > 0] if len(finding.ms) == len(steps) else steps
            lines = lines_of_spans(judged, "checkpoint", finding.rank, saving)
            file, line = max(lines, key=lambda one: lines[one][1], default=("", 0))
            if op is None and found is not None and not line:  # one sample of the phase tells it
                return _at(found)
            return _at(StackFrame(file, line, UNKNOWN, True)) if line else None
        return None if site is None else _at(StackFrame(site.file, site.line, site.function, True))
    return None if rows and not _issues_most(found, rows, stacks, finding.kind) else found


def _may_be_chance(line: CodeLine, stacks: list[WeightedStack], finding: CauseFinding, judged: Run) -> bool:
    """Whether slow steps, whose samples have ms above 0, may have as many samples of a line as they have: of
    passes, which all steps have, as large a part may be in slow ones."""
    from scipy.special import bdtrc

    at = (line.file, line.line)
    seen = [stack.ms > 0 for stack in stacks if any((one.file, one.line) == at for one in stack.frames)]
    several = samples_of_ranks(judged.whole)
    passes = [
        stack.ms > 0
        for one in several
        for stack in _chosen(finding, judged, one, 1.0, one.in_phase("backward", "optimizer"))
    ]
    share = sum(passes) / len(passes) if passes else 0.0
    return bool(bdtrc(sum(seen) - 1, len(seen), share) >= BY_CHANCE)


def waiting_calls(finding: CauseFinding, judged: Run) -> list[Waits]:
    """Calls that wait for the device, those that wait longest first, where their lines were noted; none of a
    finding that has a line of its own."""
    if finding.kind != "synchronisation" or "at" in finding.facts:
        return []
    samples = samples_of_ranks(judged.whole)
    frames = {(Path(frame.file).name, frame.line): frame for one in samples for frame in one.stacks.frames}
    stacks = [stack for one in samples for stack in one.chosen(one.is_judged)]
    library = heaviest([stack for stack in stacks if _is_of_library(stack.frames[-1])])
    all_ms = sum(stack.ms for stack in stacks)
    in_library_ms = sum(stack.ms for stack in stacks if library and stack.frames[-1].text == library.calls)
    own_files = {name for name, _ in frames}
    found: list[Waits] = []
    for ((file, line), call), (num, ms) in calls_of_spans(judged, "synchronisation", finding.rank).items():
        at, of_all_ms = frames.get((file, line), StackFrame(file, line, UNKNOWN, True)), ms * len(samples)
        # Of a file of the program as many samples would show one or more.
        is_sure = len(stacks) * of_all_ms >= 2 * FEWEST * all_ms > 0
        if library and is_sure and file not in own_files and in_library_ms >= LEAST * of_all_ms:
            at = StackFrame(library.file, library.line, library.function, True)
            call = f"{call} in {library.calls}"
        elif call == "bool":  # which is no call that samples show
            there = [stack for stack in stacks if innermost(stack.frames) == at]
            ends = [stack for stack in there if _is_of_library(stack.frames[-1])]
            if FEWEST <= len(there) < 2 * len(ends) and (most := heaviest(ends)) is not None:
                call = f"{call} in {most.calls}"
            checks = [stack for stack in there if _is_of_a_check(stack.frames[-1])]
            if FEWEST <= len(there) < 2 * len(checks):
                call = f"{call} in checks of torch.distributions"
        found += [Waits(at, call, num, ms)] if line else []
    return sorted(found, key=lambda one: -one.ms)


def _is_of_library(frame: StackFrame) -> bool:
    return not frame.is_program and frame.file not in ("", "torch", "python")


def _is_of_a_check(frame: StackFrame) -> bool:
    """Of the values that a distribution is made of or asked about."""
    return frame.file == "torch" and bool(CHECKS.fullmatch(frame.function))


def makes_groups(line: CodeLine, judged: Run) -> str:
    """Where the line, or what it calls, makes process groups in several steps, judged or not; else ''."""
    found: dict[int, str] = {}
    for one in samples_of_ranks(judged.whole):
        which = one.leaf_is(lambda leaf: leaf.file == "torch" and leaf.function in MAKE_GROUPS)
        for stack, step in zip(one.chosen(which), one.rows[which, 0].tolist(), strict=True):
            at = innermost(stack.frames)
            if at and any((frame.file, frame.line) == (line.file, line.line) for frame in stack.frames):
                found[step] = at.text
    return max(found.values(), key=[*found.values()].count) if len(found) >= FEWEST else ""


def is_dispatched(line: CodeLine, judged: Run) -> bool:
    """Whether samples of the line are in a loader of accelerate, of which one rank loads for all."""
    samples = samples_of_ranks(judged.whole)
    paths = (one.stacks.path(node) for one in samples for node in set(one.rows[:, 5].tolist()))
    dealt = (path for path in paths if any(frame.function.startswith(DEALS) for frame in path))
    return any((frame.file, frame.line) == (line.file, line.line) for path in dealt for frame in path)


def calls_model(line: CodeLine, first: int, last: int, judged: Run) -> bool:
    """Whether samples of a model's forward pass are of a call in these lines of the same file."""
    return any(
        frame.file == line.file and first <= frame.line <= last
        for one in samples_of_ranks(judged.whole)
        for stack in one.chosen(one.is_judged & one.in_phase("forward"))
        for frame in stack.frames
    )


def holds_hooks(judged: Run) -> bool:
    """Whether more samples are in what Lightning calls between a backward pass and the update than in that:
    the span of step(closure), without its passes, is of both."""
    samples = samples_of_ranks(judged.whole)
    stacks = [stack for one in samples for stack in one.chosen(one.is_judged & one.in_phase("rest"))]
    num = sum(any(frame.outer_function.endswith(BEFORE_UPDATE) for frame in one.frames) for one in stacks)
    return num >= FEWEST and num > sum(
        int((one.is_judged & one.in_phase("optimizer")).sum()) for one in samples
    )


def waiting_line(waits: list[Waits]) -> CodeLine | None:
    """That of most of the time that is waited."""
    if not waits or waits[0].ms <= MOST * sum(one.ms for one in waits):
        return None
    call, line = waits[0].call, _at(waits[0].at)
    return msgspec.structs.replace(line, calls=call if " in " in call else f"{call} of torch")


def sends_own_data(waits: list[Waits], judged: Run) -> bool:
    """Whether the function that waits reads values several times a step, and gives the device data that no
    loader has: a simulator's or a sampler's may depend on what is read. Not what it sends as objects."""
    samples = samples_of_ranks(judged.whole)
    rows = noted_program(judged.noted).get("loaders") or []
    if not waits or waits[0].call not in READS or any(row.get("num_batches") for row in rows):
        return False
    objects = {(row.file, row.line) for row in sites_of(judged) if row.kind == "an object"}
    if (waits[0].at.file, waits[0].at.line) in objects:  # which ranks tell each other
        return False
    at, num = waits[0].at, sum(one.num for one in waits if one.call in READS)
    sends = [
        stack
        for one in samples
        for stack in one.chosen(one.is_judged & one.leaf_is(lambda leaf: leaf.function in SENDS))
        if (line := innermost(stack.frames)) is not None and line.function_id == at.function_id
    ]
    return num >= SEVERAL and len(sends) >= FEWEST


def waits_text(waits: list[Waits]) -> str:
    """'the host waits for the device: item in train.py:57 (64 times a step, 6.07 ms), ...'"""
    parts = [
        f"{one.call} in {one.at.text} ({often(one.num)}, {quantity(one.ms, 'ms')})"
        for one in waits[:MOST_ISSUED]
    ]
    return f"the host waits for the device, brief waits not counted: {', '.join(parts)}" if parts else ""


def issuer_of(finding: CauseFinding, judged: Run) -> dict[str, str]:
    """By the name of the fact: what issues small messages or barriers in lines of the program, as samples
    show: a layer is SyncBatchNorm, a library's function any not named for the collective that most are in."""
    of_program = finding.kind == "small_messages" and finding.facts.get("origin") in ("program", None)
    is_meant = of_program or _op(finding) == "barrier"
    rows = [row for row in _issuing(finding, judged) if is_meant and row.is_program]
    samples = samples_of_ranks(judged.whole)
    stacks = [stack for one in samples for stack in one.chosen(one.is_judged)] if rows else []
    stacks = [stack for stack in stacks if any(_is_in(stack, row) for row in rows)]
    if sum(stack.frames[-1].function.startswith("SyncBatchNorm.") for stack in stacks) >= FEWEST:
        return {"layer": "SyncBatchNorm"}
    ops = {row.op for row in sites_of(judged) if row.place in {row.place for row in rows}}
    stacks = [stack for stack in stacks if any(_calls(stack, op) for op in ops)]
    called = [frame for stack in stacks if (frame := entered(stack.frames)) and _is_of_library(frame)]
    asked_for = (_op(finding).removeprefix("all_"), "wait_for")
    called = [frame for frame in called if not any(word in frame.function for word in asked_for)]
    if 2 * len(called) <= len(stacks):
        return {}
    return {"logs" if called[0].function.startswith("LightningModule.log") else "library": called[0].text}


def issued_text(finding: CauseFinding, judged: Run) -> str:
    """'all_reduce is issued in main(), train.py:50 (gradients, bucket 0: head.weight, 4 times a step)'

    '' where nobody looked, or more than MOST_ISSUED places issue it.
    """
    rows = _issuing(finding, judged)
    if not 0 < len(rows) <= MOST_ISSUED:
        return ""
    places = dict.fromkeys(f"in {row.place} ({row.moves}, {row.often})" for row in rows)  # of unlike bytes
    return f"{rows[0].op} is issued {', '.join(places)}"


def beside_calls_ms(finding: CauseFinding, judged: Run) -> float:
    """Of a mean step on a CPU, what ranks were seen in, in the function that issues most of a finding's
    collectives and that autograd calls, but for the calls themselves: conversions and copies. 0 where too few
    samples tell."""
    site = _issuing_most(finding, judged)
    samples = samples_of_ranks(judged.whole)
    if site is None or judged.source != "host":
        return 0.0
    stacks = [stack for one in samples for stack in one.chosen(one.is_judged & one.in_phase("backward"))]
    at = (site.file, site.function.partition(".<locals>")[0])
    found = []
    for stack in stacks:
        called = [*dropwhile(lambda frame: frame.file != "torch", stack.frames)]
        last = innermost(called)
        is_there = last is not None and last.function_id == at
        if is_there and not _calls(stack, _op(finding)):
            found.append(stack.ms / len(samples))
    return sum(found) if len(found) >= FEWEST else 0.0


def _op(finding: CauseFinding) -> str:
    """The operation that a finding of collectives is of; '' where it is of none or of several."""
    return str(finding.facts.get("op", "")) if finding.kind in OF_COLLECTIVES else ""


def _issuing(finding: CauseFinding, judged: Run) -> list[SiteRow]:
    return [row for row in sites_of(judged) if row.op == _op(finding)]


def _issuing_most(finding: CauseFinding, judged: Run) -> SiteRow | None:
    """A place of the program that issues most of the calls; where sizes matter, most of the bytes."""
    rows = _issuing(finding, judged)
    weights = _weights(rows, finding.kind)
    by_place: dict[str, float] = defaultdict(float)
    for row, weight in zip(rows, weights, strict=True):
        by_place[row.place] += weight
    most = max(rows, key=lambda row: by_place[row.place], default=None)
    is_most = most is not None and most.is_program and by_place[most.place] > MOST * sum(weights)
    return most if is_most else None


def _weights(rows: list[SiteRow], kind: CauseKind) -> list[float]:
    by_bytes = kind != "small_messages" and any(row.bytes_per_step for row in rows)
    return [row.bytes_per_step if by_bytes else row.per_step for row in rows]


def _issues_most(found: CodeLine, rows: list[SiteRow], stacks: list[WeightedStack], kind: CauseKind) -> bool:
    """Whether most is issued within the function that samples show: autograd's own threads are not sampled,
    so what a backward pass issues shows in none."""
    at = (found.file, found.function)
    inside = [stack for stack in stacks if any(one.function_id == at for one in stack.frames)]
    weights = _weights(rows, kind)
    is_inside = [any(_is_in(stack, row) for stack in inside) for row in rows]
    issued = sum(weight for weight, is_one in zip(weights, is_inside, strict=True) if is_one)
    return issued > MOST * sum(weights)


def _is_in(stack: WeightedStack, site: SiteRow) -> bool:
    """A library's frames have no lines, but functions."""
    at = (site.file, site.line, site.function)
    return any((frame.file, frame.line, frame.function) == at for frame in stack.frames)


def _calls(stack: WeightedStack, op: str) -> bool:
    """Whether its innermost frame is a function of torch for an operation: all_gather_into_tensor."""
    return any(one.file == "torch" and one.function.lstrip("_").startswith(op) for one in stack.frames[-1:])


def is_behind_backward(judged: Run, op: str) -> bool:
    """Whether samples of an operation are, in the function that begins most backward passes, in lines below
    these: behind the pass of their iteration."""
    samples = samples_of_ranks(judged.whole)[:1]
    passes = [innermost(stack.frames) for one in samples for stack in one.chosen(one.in_phase("backward"))]
    begun = Counter(one for one in passes if one is not None).most_common(1)
    if not begun:
        return False
    at = begun[0][0]
    lines = [
        frame.line
        for one in samples
        for stack in one.chosen(one.is_judged)
        if _calls(stack, op)
        for frame in stack.frames
        if frame.function_id == at.function_id
    ]
    return len(lines) >= FEWEST and 2 * sum(line > at.line for line in lines) > len(lines)


def _at(place: StackFrame | CodeLine) -> CodeLine:
    """Without samples: what a device does meanwhile, no stack shows."""
    return CodeLine(file=place.file, line=place.line, function=place.function, text=place.text)


def _beyond_the_others(finding: CauseFinding, judged: Run, rank: int) -> list[WeightedStack]:
    """What the rank does, less what the others do on average."""
    # Of all judged steps: the program does the same where its times were not taken.
    of_rank = {other: samples_of(judged.whole, other) for other in judged.ranks}
    own = of_rank.pop(rank)
    if own is None:
        return []
    others = [samples for samples in of_rank.values() if samples is not None][:MOST_RANKS]
    stacks = [
        *_chosen(finding, judged, own, 1.0),
        *(stack for samples in others for stack in _chosen(finding, judged, samples, -1 / len(others))),
    ]
    by_line: dict[StackFrame | None, list[WeightedStack]] = defaultdict(list)
    for stack in stacks:
        by_line[innermost(stack.frames)].append(stack)
    # In lines that the others spend more in they wait for this rank.
    return [stack for group in by_line.values() if sum(one.ms for one in group) > 0 for stack in group]


def _chosen(
    finding: CauseFinding,
    judged: Run,
    samples: Samples,
    factor: float,
    which: Flags | None = None,
) -> list[WeightedStack]:
    """The samples that may be the finding's, or which; of a loss in some steps those of these steps, less the
    usual."""
    in_some = finding.occasions is not None
    if finding.steps is not None:
        is_slow, is_usual = _of_its_steps(finding, finding.steps, judged)
        in_some = bool(is_usual.any())
    elif finding.occasions is None or not len(finding.occasions.is_slow):
        return samples.chosen(_which(finding, samples, in_some) if which is None else which, factor)
    else:
        is_slow, is_usual = finding.occasions.among(_steps_of(judged), _steps_of(judged.whole))
    which = _which(finding, samples, in_some) if which is None else which
    num_slow, num_usual = int(is_slow.sum()), int(is_usual.sum())
    factor *= len(is_slow) / (num_slow + num_usual)  # of the steps of which it is known
    which = which & samples.is_judged
    return [
        *samples.chosen(which & is_slow[samples.column], factor),
        *samples.chosen(which & is_usual[samples.column], -factor * num_slow / max(num_usual, 1)),
    ]


def _of_its_steps(finding: CauseFinding, steps: Flags, judged: Run) -> tuple[Flags, Flags]:
    """Of the steps that a finding is of, those that have it, and the others; all and none where they are
    alike. What lies behind the last collective of a step shows in the next one: it is in the longer one."""
    is_slow = steps.copy()
    slow = occasions(finding.ms, _steps_of(judged)[steps])
    if slow is not None:
        is_slow[steps] = slow.is_slow
        before, step_ms = np.append(is_slow[1:], False), judged.values("step_ms").max(axis=0)
        is_slow = before if np.median(step_ms[before]) > np.median(step_ms[is_slow]) else is_slow
    return is_slow, steps & ~is_slow


def _steps_of(judged: Run) -> Ints:
    return judged.global_step[judged.judged_steps]


def _which(finding: CauseFinding, samples: Samples, in_some: bool) -> Flags:
    judged, kind, op = samples.is_judged, finding.kind, finding.facts.get("op")
    if op == "given_back":
        return judged & samples.that_call(EMPTY_CACHE)
    if kind == "checkpoint" and op == "slow_steps":
        return judged & ~samples.in_phase("communication", "data")
    if op in ("loss", "weights"):
        return judged & samples.in_phase("rest") & ~samples.is_behind & ~samples.that("sleeps", "locked_out")
    if kind in OF_PHASE:
        return judged & samples.in_phase(OF_PHASE[kind])
    own = judged & ~samples.in_phase(*WAITS_IN)
    # Waiting inside of torch is for other ranks or for the device.
    own &= ~samples.that("locked_out") & ~(
        samples.that("sleeps") & samples.in_phase("forward", "backward") & samples.leaf_in("torch")
    )
    match kind:
        case "pause" if op is None:
            return judged & samples.in_phase("evaluation")
        case "pause" if op == "slow_steps":  # the line that calls backward tells nothing to do otherwise
            return own & ~(samples.in_phase("backward") & samples.leaf_in("torch"))
        case "pause" if op == "asleep":
            return own & samples.that("sleeps")
        case "late_rank" if op == "sleeps":
            return own & samples.that("sleeps")
        case "late_rank" if in_some:  # of its steps: less what it has in its other steps
            return own & ~samples.in_phase("backward", "optimizer")
        case "late_rank":  # a rank that computes longer in its model has more to compute
            return own & ~samples.in_phase("forward", "backward", "optimizer")
        case "between_steps" if not finding.takes:
            return ~judged & samples.at("no_step")
        case "between_steps":
            return own & (samples.at("behind_body") | (samples.in_phase("rest") & samples.is_behind))
        case _ if kind in OF_COLLECTIVES:
            return judged & samples.in_phase("communication")
        case "garbage_collection" | "synchronisation" | "copy" | "memory":
            waits = judged & samples.that_call(SYNCHRONIZE) & (kind == "synchronisation")
            return (own & samples.in_phase("rest")) | waits
        case _:
            return own
