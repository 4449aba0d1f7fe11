"""What the program itself does in every step, outside of its model, loader and optimizer: by sampled stacks.

Averages of weights, metrics, logging, checks of gradients. The loop's own lines hold the loss function as
well, so that they are named from a larger share on.
"""

import builtins
import io
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from aorta.account.cause import CauseKind, CodeLine
from aorta.account.judge.alike import parameter_bytes
from aorta.account.judge.cells import Account, has_point_to_point
from aorta.account.judge.occasional import Occasions
from aorta.account.judge.phases import phases_of
from aorta.account.judge.sites import sites_of
from aorta.account.judge.stacks import (
    CALLED_OF_TORCH,
    FEWEST,
    LATE,
    Samples,
    heaviest,
    innermost,
    is_a_loss,
    is_of_torch,
    sampled_ms,
    samples_of_ranks,
    timed_samples_of_all,
)
from aorta.account.load.measures import noted_modes
from aorta.account.load.rank.kernels import COPY_TIME, NAME_TIME, TIME
from aorta.account.load.rank.phases import PREFIX
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import quantity
from aorta.account.rows import of_the_others
from aorta.records.schema import NO_CALL, NO_OPTIMIZER, HostKind, StepPhase
from aorta.records.stacks import Function, StackFrame, StackPhase
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.why.causes.finding import WAIT, CauseFinding
from aorta.why.causes.losses.host_needs import MOSTLY_IDLE
from aorta.why.causes.losses.kernels_by_name import CONVOLUTION, THROUGH_MEMORY
from aorta.why.causes.losses.seen import Line, Seen, line_of
from aorta.why.causes.program import noted_line, program_of
from aorta.why.causes.rules import faster_form, instead_of
from aorta.why.causes.source import asks, goes_through, hands_numbers, loops_around, source_of

OWN = "the program's own code"
Group = tuple[str, str, int]
"""File, function, and in the loop itself the line; 0 elsewhere, and below 0 of several lines the first."""
Groups = dict[Group, list[int]]
"""Rows of samples."""
CPU_CELLS: tuple[str, ...] = ("compute", "core_taken", "blocked")
DEVICE_CELLS: tuple[str, ...] = ("launch", "synchronisation", "blocked", "core_taken", "copy", "idle")
MOST_GROUPS = 3
LARGE = 0.1
"""Of a step, from which on a group is called by what it does to the device."""
MOSTLY = 0.4
"""Of the idle time that the largest group may take, from which on exposed copies are what it does."""
AROUND: dict[StackPhase, tuple[StepPhase, ...]] = {
    "rest": ("forward", "logging", "rest"),
    "data": ("data",),
    "evaluation": ("evaluation",),
    "checkpoint": ("checkpoint",),
}
"""Phases of the host that may hold samples of each: what is before backward passes may count as forward."""
FEW_OF_THEM = 0.1
"""Of the samples of a loss, which may be in a phase by chance."""
READ_AT = re.compile(r"values.* \(at (.+):(\d+)\)$")
"""Function and line, in the reason why a model was not counted."""
CHECKS = re.compile(r"(^|\.)is(nan|inf|finite)$")
"""In names of operators that look whether values are numbers."""
ORDERS = re.compile(
    "unique|_return_|coalesce(?!d)|bincount|histc|argsort|searchsorted|bucketize|isin(?!st|f)|sparse_(coo|cs)"
)
"""In names of operators that tell where rows belong: they have no gradients. "Coalesced" is what is sent."""
METRIC_MODULES = ("torchmetrics", "torcheval")
"""Libraries whose modules are part of no model."""
OF_VALUES = ("torch.tensor", "torch.as_tensor", "torch.from_numpy")
"""Names of functions that make a tensor of Python's values or numpy's."""
MOST_IN_SLOW = 0.7
"""Of a group's samples, from which on it comes in slow steps alone."""
OF_PYTHON = (
    *(builtins, str, list, dict, set, re.Pattern, io.TextIOWrapper, io.BufferedReader),
    np.random.Generator,
)
"""What has names of functions that are no operators of torch's,"""
ALSO_OF_TENSORS = (
    *("abs", "add", "all", "any", "detach", "max", "min"),
    *("multinomial", "pow", "round", "sort", "sub", "sum", "values"),
)
"""but for these."""
OF_ARRAYS = (
    *("all", "any", "argmax", "argmin", "argsort", "clip", "cumprod", "cumsum", "diagonal", "dot", "flatten"),
    *("max", "mean", "min", "prod", "reshape", "squeeze", "std", "sum", "transpose", "var", "view"),
)
"""Methods that tensors and numpy's arrays both have."""
SLOWING = {
    "tracer": "a tracer of Python's lines",
    "profile": "a profiler of Python's calls",
    "tracemalloc": "tracemalloc",
    "memory_history": "the history of the device's memory",
    "mkldnn": "torch without oneDNN",
    "cudnn_benchmark": "cuDNN, which tries its kernels out for each new size",
}
"""By the name in run.json."""
FEWEST_SIZES, NEARLY_ALL = 4, 0.8
"""Steps that tell whether sizes vary, and of these that differ: of a few sizes that come again, trials are
few."""
CALL, CALL_ERROR = 3.0, math.log(2.0)
"""What cProfile adds to a call, of what it adds in a burst: 1.9 to 5.2 times in seven programs, least in a
loop that calls one function, most where calls lie far apart."""
DEALS, DEALT_BYTES = ("broadcast", "scatter"), 1 << 20
"""How one rank hands batches to the others, and what it does not hand out of less in a step."""
AS_MANY = 0.01
"""Part by which bytes may differ that are the same: single values go beside them."""
BACKWARD = "backward"
PASSES = ("forward", "__call__", "<module>")
"""Functions that are the model, or the loop; so is a backward that no backward pass calls."""
COPIES = re.compile(r"(^|[._])(to|to_device|cuda|copy_|prepare_input)$")
"""Functions that hand a batch to the device."""
TO_HOST = re.compile(r"(^|[._])(to|cpu|copy_|_to_copy|numpy)$")
"""Functions that may copy to the host."""
COPYING = 0.25
"""Part of code that copies, from which on what else it does is work on what was copied."""
HANDS_NUMBERS = re.compile(r"torch\.(tensor|as_tensor)|((torch|Tensor)\.)?(to|cuda)|broadcast_all")
"""Functions that may give the device a tensor of Python's numbers; the last is of torch.distributions."""
OF_NUMBERS = "broadcast_all"
WAITED_OF_NUMBERS = 1000
"""Times as long as the copies themselves, from which on a thread in these waits for the device: looking at
the values of a list takes about 100 times as long as copying them."""
EMPTY_CACHE, SYNCHRONIZE, COMPILES = "empty_cache", "synchronize", "_compile"
NOT_OWN = (EMPTY_CACHE, COMPILES, "Optimizer.zero_grad", "Module.zero_grad")
"""Functions of torch; of the first the allocator's counters know better what it costs, and gradients must be
set back."""
OF_EACH_STEP = 0.9
"""Calls a step of what each step has."""
MANY_WAITS = 4
"""A step: a value that is read once or twice does not make the code around it wait."""
DETAILED_STEPS = 24
WHERE = re.compile(r" in (.+):(\d+)$")
"""File and line of a noted wait: 'item in train.py:88'."""
LEAST = 0.02
"""Of a step."""
ALSO_OTHERS = 0.25
"""Of what one rank is in, up to which it is the rank's alone though others are seen there."""
TRACEBACKS = (
    *("format_stack", "extract_stack", "StackSummary", "walk_stack", "format_list", "FrameSummary"),
    *("checkcache", "lazycache", "updatecache", "getline"),
)
"""Functions in which autograd's anomaly detection keeps the stack of each operator."""
ANOMALY_MS = 0.13
"""What it costs at most for an operator of both passes: 0.12 and 0.13 in two programs of Lightning, in whose
deep stacks each operator is called."""


def program_code(
    judged: Run, account: Account, slow: tuple[Occasions, Ints] | None = None
) -> Iterator[CauseFinding]:
    """slow: steps of which what comes in them alone has its own cause, and the steps that it is known of."""
    yield from _slowed(judged, account)
    whole, samples = judged.whole, timed_samples_of_all(judged)
    if not samples:
        return
    cells = DEVICE_CELLS if account.on_device else CPU_CELLS
    yield from _compiles(whole, account, samples)
    if "anomaly" in program_of(judged.noted)[0]:
        in_stacks = Seen.where(samples, lambda one: one.leaf_is(_keeps_a_stack))
        yield _anomaly(judged, account, *in_stacks.common_ms(whole, account))
    for num, seen in _waits_in_passes(judged, account, samples):
        ms, num_samples = seen.common_ms(whole, account)
        facts: dict[str, Any] = {"at": seen.first, "often": f"{num:.0f}", "read_ms": float(ms.mean())}
        takes: dict[tuple[str, ...], float] = {("synchronisation", *DEVICE_CELLS): 1.0}
        yield CauseFinding("synchronisation", ms, takes, facts, num_samples=num_samples)
    handing, of_handing = _handing_numbers(judged, account, samples)
    sending, of_sending = _sending_objects(judged, account, samples)
    yield from (*of_handing, *of_sending)
    loops = {function for one in samples for function in loops_of(one)}
    forward = Seen.where(samples, lambda one: one.in_phase("forward"))
    has_no_model = judged.noted.not_measured.get("flops_per_step") in (NO_CALL, NO_OPTIMIZER)
    has_no_model &= forward.num < FEWEST
    loop = judged.noted.loss_loop
    # Without a module that is the model, what comes before a backward pass is; a loop has its own cause.
    is_loop = loop is not None and not loop.least_bytes and (loop.ms is not None or bool(loop.weights_bytes))
    only_behind = has_no_model or is_loop
    called = {frame for path in forward.paths for frame in path if frame.function_id in loops}
    first = min((frame.line for frame in called), default=0)
    is_by_hand = loop is not None and loop.least_bytes > 0
    backward = Seen.where(samples, lambda one: one.in_phase("backward"))
    last = max(
        (frame.line for path in backward.paths for frame in path if frame.function_id in loops), default=0
    )
    of_all = [_groups(one, loops) for one in samples]
    of_all = _in_stretches(judged, samples, of_all, loops, range(first, last + 1))
    # What the program collects of garbage is its own cause.
    asked_for = lines_of_spans(judged, "garbage_collection")
    is_slow = None if slow is None else slow[0].among(slow[1], whole.global_step[whole.judged_steps])[0]

    def is_below_model(path: list[StackFrame]) -> bool:
        """In the line that calls the model first, or below it."""
        line = _group_of(path, loops)[0]
        return line is not None and 0 < first <= line[2]

    def is_of_loss(path: list[StackFrame]) -> bool:
        is_operator = path[-1].is_program or is_of_torch(path[-1])
        return is_by_hand and is_operator and is_below_model(path)

    def is_own(one: Samples, row: int) -> bool:
        path = one.path(row)
        is_behind = one.is_behind[row] or not (only_behind or is_of_loss(path))
        at = line_of(innermost(path))
        if at in sending:
            return False
        is_known = (at, path[-1].function) in handing
        return is_behind and at not in asked_for and not is_known

    grouped = [
        {
            group: own
            for group, rows in groups.items()
            if (own := [row for row in rows if is_own(one, row)])
            and (is_slow is None or not _are_most_in(is_slow, one, own))
        }
        for one, groups in zip(samples, of_all, strict=True)
    ]
    # Of the call of a library's loop no code is the program's own; but what that copies it waits for as the
    # program's own code does.
    in_both = _in_both(samples)
    common = set.intersection(*(set(groups) for groups in grouped))
    found = []
    waited = lines_of_spans(judged, "synchronisation") if account.on_device else {}
    for group in common:
        is_loop = (Path(group[0]).name, group[2]) in in_both
        seen = Seen(samples, [groups[group] for groups in grouped])
        if is_loop:
            seen = seen.that(lambda path: account.on_device and bool(COPIES.search(path[-1].function)))
        if seen.num < FEWEST:
            continue
        ms, num_samples = seen.common_ms(whole, account)
        ms = ms * _not_waiting(seen, waited)
        if ms.mean() >= LEAST * account.mean_step_ms:
            found.append((group, is_loop, seen, ms, num_samples))
    waits = {line for line, (num, _) in waited.items() if num >= MANY_WAITS}
    # On a busy CPU, of what is the ranks' own time, as these samples are.
    least = LARGE * (1.0 if account.on_device else 1 - account.share("core_taken"))
    largest = sorted(found, key=lambda entry: -entry[3].mean())[:MOST_GROUPS]
    for place, (group, is_loop, seen, ms, num_samples) in enumerate(largest):
        paths = seen.paths
        facts = {"what": OWN, "op": "" if _is_no_loss(paths) or group[2] <= 0 else "loop"}
        facts |= {"part_ms": float(ms.mean()), "origin": _libraries(paths), "group": tuple(seen.stacks)}
        facts["runs"] = _called_in(paths, group[1]) if group[2] else None
        if facts["origin"] == "values" and is_below_model(paths[0]):
            facts["origin"] = "values_of_model"  # which no data set has
        if facts["origin"] == "values" and any(
            row.kind == "an object" and (row.file, row.function) == group[:2] for row in sites_of(judged)
        ):
            facts["origin"] = "objects"
        lines = {frame.line for path in paths for frame in path if frame.function_id == group[:2]}
        facts |= dealt(judged, [StackFrame(group[0], 0, group[1], True).text], lines if group[2] else None)
        facts |= _sent_to_host(judged, paths, facts["part_ms"]) if account.on_device else {}
        kind: CauseKind = "program_code"
        if account.on_device and ms.mean() >= LARGE * account.mean_step_ms:
            is_in = waits & seen.lines
            num = sum(path[-1].file == "torch" and path[-1].function.endswith(SYNCHRONIZE) for path in paths)
            # A copy from memory that is not pinned waits for all that is queued: only idle time is its cost.
            idle_ms = min(float(ms.mean()), account.mean_ms(*DEVICE_CELLS))
            is_copying = place == 0 and account.mean_ms("copy") >= MOSTLY * idle_ms
            kind = "synchronisation" if is_in or 2 * num > len(paths) else "copy" if is_copying else kind
            if kind == "synchronisation" and account.share("launch") >= MOSTLY_IDLE:
                # A host that nothing holds up gains what it waits; what it launches in between stays.
                of_lines = seen.that(lambda path: line_of(innermost(path)) in waits)
                ms, num_samples = of_lines.common_ms(whole, account)
                ms = np.maximum(ms - account.mean_ms("synchronisation"), 0.0)
        if kind == "copy" and facts["origin"] == "sent_to_host":
            facts["origin"] = "device_to_pageable"
        if is_loop and kind != "copy":
            continue
        at = _line_of_entries(judged, seen, are_lines=group[2] < 0) if kind == "program_code" else None
        if at is not None and group[2] <= 0:
            facts |= {"op": "entries", "at": at}
            is_of_values = group[2] == 0 or at.calls in OF_VALUES
            facts["origin"] = None if facts["origin"] == "values" and not is_of_values else facts["origin"]
        enough = least / 2 if facts["op"] == "entries" and not account.on_device else least
        is_small = ms.mean() < enough * account.mean_step_ms or seen.may_be_chance(enough / 2)
        if kind == "program_code" and is_small:
            continue  # it would not be named, and take from what is
        most_ms = phases_around_ms(judged, seen) if kind == "program_code" else math.inf
        yield CauseFinding(kind, ms, {cells: 1.0}, facts=facts, num_samples=num_samples, most_ms=most_ms)


def phases_around_ms(judged: Run, seen: Seen) -> float:
    """What a step has, by the host's clock, of the phases that these samples are in: no more than that goes
    with what they show. Infinite where they are in passes too."""
    ms = Counter({row.phase: row.ms for row in phases_of(judged)})
    is_in: dict[StackPhase, bool] = {
        name: sum(int(one.in_phase(name)[rows].sum()) for one, rows in seen.of) > FEW_OF_THEM * seen.num
        for name in get_args(StackPhase)
    }
    around = {phase for name, is_there in is_in.items() if is_there for phase in AROUND.get(name, ())}
    is_known = ms and all(name in AROUND for name, is_there in is_in.items() if is_there)
    return sum(ms[phase] for phase in around) if is_known else math.inf


def _compiles(whole: Run, account: Account, samples: list[Samples]) -> Iterator[CauseFinding]:
    seen = Seen.where(samples, lambda one: one.that_call(COMPILES))
    at = heaviest(seen.stacks)
    if at is not None and at.num_samples >= FEWEST:
        facts = {"op": "compiles", "what": "torch.compile, which compiles anew", "at": at}
        cells = DEVICE_CELLS if account.on_device else CPU_CELLS
        ms, num = seen.common_ms(whole, account)
        yield CauseFinding("program_code", ms, {cells: 1.0}, facts, num_samples=num)


def _slowed(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What the program has on that makes its Python, its allocations or its operators slower, each by a
    little. A device that is busy hides it. Samples show none of it: they are taken where an operator lets go
    of the interpreter's lock. cProfile counts the calls that it slows down."""
    modes = noted_modes(judged.noted)
    slowed_by = modes.get("slowed_by") or {}
    is_hidden = account.on_device and account.mean_ms(*DEVICE_CELLS) < LARGE * account.mean_step_ms
    for name in slowed_by.keys() & SLOWING.keys():
        sizes = _sizes_tried(judged) if name == "cudnn_benchmark" else None
        if sizes is None if name == "cudnn_benchmark" else is_hidden:
            continue
        at = noted_line(slowed_by[name])
        facts = {"op": "slowed", "origin": name, "what": SLOWING[name], "at": at}
        per_s, call_ns = (modes.get(f"profiled_{of}") for of in ("calls_per_s", "call_ns"))
        if name == "profile" and per_s and call_ns:
            facts |= {"calls_per_step": per_s * account.mean_step_ms / 1e3, "call_ns": float(call_ns)}
            ms = account.step_ms.mean(axis=0) * min(per_s * CALL * call_ns / 1e9, 1.0)
            cells = DEVICE_CELLS if account.on_device else (*CPU_CELLS, "optimizer")
            yield CauseFinding("program_code", ms, {cells: 1.0}, facts, size_error=CALL_ERROR)
            continue
        waits = (
            f", at most {quantity(account.mean_ms(*DEVICE_CELLS, *WAIT), 'ms')}, in which the device waits"
        )
        most = waits if account.on_device else ""
        facts["why_no_size"] = f"in all steps{most}, and no sample shows how much slower these are by it"
        if sizes is not None:
            facts["why_no_size"] = "in steps with a size that is new, and no record tells trials from use"
            if sizes[1]:
                facts["sizes"], facts["in_steps_seen"] = map(str, sizes)
        if name != "mkldnn" or not account.on_device:
            yield CauseFinding("program_code", np.zeros(judged.num_judged), {}, facts, is_risk=True)


def _sizes_tried(judged: Run) -> tuple[int, int] | None:
    """Different ones, and in how many steps, where nearly each has convolutions of another size; 0 in 0 where
    the process ended before it could say."""
    work, kernels = judged.noted.work, operations(judged.metrics, NAME_TIME)
    has_no_end = work is None and judged.noted.finished_unix_ns is None
    num_sizes, num_steps = (0, 0) if work is None else work.num_sizes
    is_varied = num_steps >= FEWEST_SIZES and num_sizes >= NEARLY_ALL * num_steps
    has_convolutions = any(CONVOLUTION.search(name) for name in kernels)
    return (num_sizes, num_steps) if (is_varied or has_no_end) and has_convolutions else None


def fallen_back(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """A function that torch compiles no longer, and runs eagerly. No record tells which kernels and launches
    are its own: on a device all that compiled code has fewer of are the most that it costs."""
    modes = noted_modes(judged.noted)
    for one in (modes.get("fallen_back") or [])[:1]:
        at = StackFrame(one["file"], one["line"], one["function"], True)
        facts: dict[str, Any] = {"op": "fallen_back", "at": at, "times": one["times"]}
        facts["what"] = "compiled code that fell back to eager"
        facts["varies"] = one["varies"] or "what it is called with, or what it reads,"
        if not account.on_device:
            samples = samples_of_ranks(judged.whole)
            is_sampled = sum(int(one.is_judged.sum()) for one in samples) >= FEWEST / LARGE
            if not is_sampled or sampled_ms(judged, at.file, at.function) >= LEAST * account.mean_step_ms:
                facts["why_no_size"] = "no step shows what it takes when it is compiled"
                yield CauseFinding("program_code", np.zeros(judged.num_judged), {}, facts, is_risk=True)
            return
        launch_ms = account.mean_ms("launch")
        most_ms = launch_ms + sum(judged.mean_of(of_operation(TIME, name)) or 0.0 for name in THROUGH_MEMORY)
        if most_ms >= LARGE * account.mean_step_ms:
            facts |= {"memory_ms": most_ms, "is_most": True}
            facts["not_known"] = "which of the kernels and launches are its own"
            part = launch_ms / most_ms
            takes: dict[tuple[str, ...], float] = {("compute", "hidden"): 1 - part, ("launch",): part}
            yield CauseFinding("program_code", np.full(judged.num_judged, most_ms), takes, facts)


def _keeps_a_stack(leaf: StackFrame) -> bool:
    return not leaf.is_program and leaf.function.startswith(TRACEBACKS)


def _anomaly(judged: Run, account: Account, ms: Floats, num: int) -> CauseFinding:
    """The stacks that it keeps of operators, as samples show, and its checks of each gradient in the backward
    pass: on a device, whose answers the host waits for, the idle time of that. On a CPU both are within the
    passes, and no sample finds code that holds the interpreter's lock: half of the rest is told, and no more
    than so many operators cost. Of four programs 0.94 to 1.15 of that half was lost."""
    seen_ms, backward_ms = float(ms.mean()), judged.mean_of_host(f"{PREFIX}{BACKWARD}") or 0.0
    at, work = noted_modes(judged.noted).get("anomaly_at"), judged.noted.work
    at = None if at is None or _turns_it_off(at[0], at[1], judged) else at
    facts: dict[str, Any] = {"op": "anomaly", "what": "autograd's anomaly detection"}
    facts |= {"stacks_ms": seen_ms, "backward_ms": backward_ms}
    facts["at"] = noted_line(at)
    if account.on_device:
        ms = ms + min(backward_ms, max(account.mean_ms("launch") - seen_ms, 0.0))
        return CauseFinding("program_code", ms, {DEVICE_CELLS: 1.0}, facts, num_samples=num)
    rest_ms = backward_ms + max((judged.mean_of_host(f"{PREFIX}forward") or 0.0) - seen_ms, 0.0)
    operators = 0 if work is None else sum(line.operators for line in work.lines)
    half_ms = min(rest_ms / 2, max(operators * ANOMALY_MS - seen_ms, 0.0))
    found = CauseFinding("program_code", ms, {CPU_CELLS: 1.0}, facts, more_ms=rest_ms)
    if half_ms > 0 and seen_ms > 0:
        found.ms, found.more_ms = ms * (1 + half_ms / seen_ms), 0.0
        found.size_error = half_ms / 2 / found.mean_ms
        facts |= {"unseen_ms": half_ms, "operators": operators}
    return found


def _turns_it_off(file: str, line: int, judged: Run) -> bool:
    """Whether the line says so, which does nothing where an argument of a library turns it on again."""
    source = source_of(file, judged.noted)
    return source is not None and b"detect_anomaly(False" in source.text.splitlines()[line - 1]


def _waits_in_passes(judged: Run, account: Account, samples: list[Samples]) -> Iterator[tuple[float, Seen]]:
    """How often a step, and samples, of lines within the model's passes, as of hooks, that wait for
    the device for each of many values: a host that bounds the step launches nothing meanwhile."""
    if not account.on_device or account.share("launch") < LARGE:
        return
    # A function without a frame, such as item(): what a library waits for within its own is not meant.
    read = Seen.where(samples, lambda one: one.in_phase("forward", "optimizer") & one.leaf_in(""))
    by_line = read.by(lambda path: line_of(innermost(path)))
    for line, (num, _) in lines_of_spans(judged, "synchronisation").items():
        if num >= MANY_WAITS and line in by_line and by_line[line].fewest >= FEWEST:
            yield num, by_line[line]


def _may_hand_numbers(leaf: StackFrame) -> bool:
    return leaf.file in ("", "torch") and HANDS_NUMBERS.fullmatch(leaf.function) is not None


def _handing_numbers(
    judged: Run, account: Account, samples: list[Samples]
) -> tuple[set[tuple[Line | None, str]], list[CauseFinding]]:
    """The line, if there is one, in which the thread waits most as it hands numbers to the device, with the
    function that does, and that loss: a copy of memory that is not pinned comes back when the device has done
    all that was launched."""
    copied_ms = judged.mean_of(of_operation(COPY_TIME, "pageable_to_device"))
    if not account.on_device or not copied_ms:
        return set(), []
    may_be = Seen.where(samples, lambda one: one.leaf_is(_may_hand_numbers))
    by_call = may_be.by(lambda path: (line_of(innermost(path)), path[-1].function))
    call = max(by_call, key=lambda one: by_call[one].num, default=None)
    seen = may_be if call is None else by_call[call]
    at = seen.first
    if call is None or at is None or seen.fewest < FEWEST:
        return set(), []
    ms, num_samples = seen.common_ms(judged.whole, account)
    is_wait = ms.mean() >= max(2 * LEAST * account.mean_step_ms, WAITED_OF_NUMBERS * copied_ms)
    if call[1] != OF_NUMBERS:
        source = source_of(at.file, judged.noted)
        is_wait &= source is not None and hands_numbers(source.tree, at.line, call[1])
    if not is_wait:
        return set(), []
    facts = {"op": "numbers", "at": heaviest(seen.stacks), "handing_ms": float(ms.mean())}
    wait = CauseFinding("synchronisation", ms, {DEVICE_CELLS: 1.0}, facts, num_samples=num_samples)
    # No note tells how long the device idles behind the wait, which may be longer than the wait.
    wait.more_ms = max(account.mean_ms("launch") - wait.mean_ms, 0.0)
    return {call}, [wait]


def _sending_objects(
    judged: Run, account: Account, samples: list[Samples]
) -> tuple[set[Line], list[CauseFinding]]:
    """The lines that send objects in each step, and that loss of the one with most of it: values are read
    into Python for it, pickled, waited for on the host, and unpickled, which collectives do not show. Not
    what the thread waits there for work that the device has to do anyway."""
    sites = [row for row in sites_of(judged) if row.kind == "an object" and row.per_step >= OF_EACH_STEP]
    lines = {(Path(row.file).name, row.line) for row in sites if row.is_program}
    by_line = Seen.where(samples, lambda one: one.is_judged).by(
        lambda path: at if (at := line_of(innermost(path))) in lines else None
    )
    at = max(by_line, key=lambda line: by_line[line].num, default=None)
    if at is None or by_line[at].fewest < FEWEST:
        return set(), []
    seen, waited = by_line[at], lines_of_spans(judged, "synchronisation") if account.on_device else {}
    ms, num_samples = seen.common_ms(judged.whole, account)
    op = next(row.op for row in sites if (Path(row.file).name, row.line) == at)
    ms = ms * _not_waiting(seen, {line: (0.0, of_line) for line, (_, of_line) in waited.items()})
    if ms.mean() < LEAST * account.mean_step_ms:
        return set(), []
    facts: dict[str, Any] = {"what": f"{op} of an object", "op": op, "origin": "object"}
    facts |= {"moves": "an object", "at": heaviest(seen.stacks), "sending_ms": float(ms.mean())}
    facts |= {"kind_of_loss": "pickling and transfer"}
    cells = (*DEVICE_CELLS, "transfer") if account.on_device else ("transfer", "communication", *CPU_CELLS)
    return {at}, [CauseFinding("transfer", ms, {cells: 1.0}, facts, num_samples=num_samples)]


def code_in_passes(judged: Run, account: Account, losses: list[CauseFinding]) -> Iterator[CauseFinding]:
    """Python and numpy that forward and backward passes run on a CPU, of the function with most of it; not of
    a loop over operators, whose Python is in that loss."""
    whole, samples = judged.whole, timed_samples_of_all(judged)
    if account.on_device or not samples:
        return
    # An operator that a sign calls has no frame: what samples show is either that or Python.
    operators = operators_of(judged)
    known = [at for one in losses if isinstance(at := one.facts.get("at"), StackFrame)]
    told = {at.function_id for at in known}
    has_anomaly = "anomaly" in program_of(judged.noted)[0]  # which has a cause of its own
    in_passes = Seen.where(samples, lambda one: one.in_phase("forward", "backward") & ~one.that("locked_out"))
    # A library's function that calls torch's, such as Trainer.train, has operators without a frame in others.
    models = {entry for path in in_passes.paths if path[-1].file == "torch" and (entry := entered(path))}
    in_loop = _reading_loop(judged, samples)

    def function_of(path: list[StackFrame]) -> tuple[str, str, str] | None:
        leaf, at, origin = path[-1], innermost(path), "in_passes"
        is_module = leaf.file == "torch" and leaf.function.endswith("forward")  # with much to compute, maybe
        if at is not None and faster_form(_name_of(leaf)) and not _is_handed_on(leaf, at, judged):
            origin = "costly"
        elif at in in_loop and not is_module:
            origin = "reading"
        elif ORDERS.search(leaf.function) and not leaf.is_program:
            origin = "ordering"
        elif entered(path) in models or (has_anomaly and _keeps_a_stack(leaf)):
            return None
        else:
            is_sign = leaf.is_program and (not operators or (leaf.file, leaf.line) in operators)
            # A tensor is made there of Python's values, which are made without letting go of the lock.
            at = at if leaf.function in OF_VALUES else None if is_sign else _python_at(path)
        is_told = at is None or at.function_id in told
        return None if at is None or is_told else (*at.function_id, origin)

    by_function = in_passes.by(function_of).items()
    most, seen = max(by_function, key=lambda entry: entry[1].num, default=(None, None))
    if most is None or seen is None or seen.fewest < FEWEST:
        return
    ms, num = seen.common_ms(whole, account)
    facts = {
        "what": OWN,
        "op": most[2],
        "origin": most[2],
        f"{most[2]}_ms": float(ms.mean()),
        "at": heaviest(seen.stacks),
        "instead": _instead(seen.paths),
    }
    if ms.mean() >= LARGE * account.mean_step_ms:
        found = CauseFinding("program_code", ms, {CPU_CELLS: 1.0}, facts=facts, num_samples=num)
        backward_ms = judged.mean_of_host(f"{PREFIX}{BACKWARD}") or 0.0  # of which it has as much
        found.more_ms = min(found.mean_ms, backward_ms) if most[2] == "reading" else 0.0
        yield found


def _is_handed_on(leaf: StackFrame, at: StackFrame, judged: Run) -> bool:
    """Whether it tells which values are no numbers in a line that decides nothing by that: the model may go
    on with it, as with a mask."""
    source = source_of(at.file, judged.noted) if CHECKS.search(leaf.function) else None
    return source is not None and not asks(source.tree, at.line)


def _instead(paths: list[list[StackFrame]]) -> str | None:
    """What is done in place of what most of these are in; None where that is not known."""
    called = Counter(_name_of(path[-1]) for path in paths if not path[-1].is_program).most_common(1)
    remedy = instead_of((called[0][0],), "program_code", frozenset()) if called else None
    return None if remedy is None else remedy.set


def _name_of(leaf: StackFrame) -> str:
    """As calls.yaml has it."""
    return f"{leaf.function} of {leaf.file}" if leaf.file else leaf.function


def operators_of(judged: Run) -> set[Line]:
    """Lines of the model whose operators were counted."""
    work = judged.noted.work
    return set() if work is None else {(line.at.file, line.at.line) for line in work.lines}


def _reading_loop(judged: Run, samples: list[Samples]) -> set[StackFrame]:
    """Lines of loops of the model around the value that a count without data came upon, and of loops within
    loops, which it did not count then. Empty without such a value, and where the source was written since."""
    found = READ_AT.search(judged.noted.not_measured.get("flops_per_step", ""))
    if found is None:
        return set()
    frames = {frame for one in samples for frame in one.stacks.frames if frame.is_program}
    sources = {file: source_of(file, judged.noted) for file in {frame.file for frame in frames}}
    in_loops = set()
    for frame in frames:
        source = sources[frame.file]
        loops = [] if source is None else loops_around(source.tree, frame.line)
        reads = frame.text.rpartition(":")[0] == found[1] and any(
            loop.lineno <= int(found[2]) <= (loop.end_lineno or 0) for loop in loops
        )
        in_loops |= {frame} if reads or len(loops) > 1 else set()
    return in_loops


def entered(path: list[StackFrame]) -> StackFrame | None:
    """The library's function that the innermost line of the program calls; None where it calls none."""
    inner = max((place for place, frame in enumerate(path) if frame.is_program), default=len(path))
    return next((frame for frame in path[inner + 1 :] if frame.file), None)


def _python_at(path: list[StackFrame]) -> StackFrame | None:
    """The innermost line of the program, if what runs is that or Python that it calls: no function of
    torch's, and no method of a tensor, or of what may be one."""
    inner = max((place for place, frame in enumerate(path) if frame.is_program), default=None)
    called = [] if inner is None else path[inner + 1 :]
    return None if inner is None or any(map(_may_be_torchs, called)) else path[inner]


def _may_be_torchs(frame: StackFrame) -> bool:
    """Of a name without a frame: view() and act() may be anything."""
    if frame.file or frame.is_program:
        return frame.file == "torch"
    owner, dot, name = frame.function.rpartition(".")
    if dot and owner not in ("np", "numpy") and name in OF_ARRAYS:
        return True
    is_builtin = any(hasattr(one, frame.function) for one in OF_PYTHON)
    is_builtin = is_builtin and frame.function not in ALSO_OF_TENSORS
    return frame.function.startswith(CALLED_OF_TORCH) or not (is_builtin or "." in frame.function)


def lines_of_spans(
    run: Run, kind: HostKind, rank: int | None = None, chosen: Ints | None = None
) -> dict[Line, tuple[float, float]]:
    """By line of the program, how often a step spans of this kind were noted there, and of how many ms;
    ('', 0) of those with which no line was noted. Arguments: as of calls_of_spans."""
    found: dict[Line, tuple[float, float]] = {}
    for (line, _), (num, ms) in calls_of_spans(run, kind, rank, chosen).items():
        before = found.get(line, (0.0, 0.0))
        found[line] = before[0] + num, before[1] + ms
    return found


def calls_of_spans(
    run: Run, kind: HostKind, rank: int | None = None, chosen: Ints | None = None
) -> dict[tuple[Line, str], tuple[float, float]]:
    """The same by the function that was called there. Of the first steps of one rank; chosen: of these
    steps."""
    steps = set((run.global_step[run.judged_steps] if chosen is None else chosen).tolist())
    of_rank = run.records(run.ranks[0] if rank is None else rank)
    records = (record for record in of_rank if record.global_step in steps)
    noted = [record.host_spans for record in islice(records, DETAILED_STEPS) if record.host_spans is not None]
    found: dict[tuple[Line, str], tuple[float, float]] = {}
    for span in (span for spans in noted for span in spans if span.kind == kind):
        place = WHERE.search(span.where)
        line = (Path(place[1]).name, int(place[2])) if place else ("", 0)
        call = line, span.where[: place.start()] if place else ""
        num, ms = found.get(call, (0.0, 0.0))
        found[call] = num + 1 / len(noted), ms + (span.end_ms - span.start_ms) / len(noted)
    return found


def _not_waiting(seen: Seen, waited: dict[Line, tuple[float, float]]) -> float:
    """Part of a group's samples in which the thread does not wait for queued work of the device. Where it
    waits time and again, the device idles for that in between."""
    total = idle = 0.0
    for line, of_line in seen.by(lambda path: line_of(innermost(path))).items():
        ms = sum(float(one.ms[rows].sum()) for one, rows in of_line.of) / len(seen.of)
        num, waited_ms = waited.get(line, (0.0, 0.0))
        total += ms
        idle += ms if num >= MANY_WAITS else max(ms - waited_ms, 0.0)
    return idle / total if total > 0 else 1.0


def dealt(judged: Run, lines: Iterable[str], only: set[int] | None = None) -> dict[str, Any]:
    """Facts of batches that a rank hands out in these lines' functions, or only in some lines; else none."""
    functions = {text.rpartition(":")[0] for text in lines}
    rows = [row for row in sites_of(judged) if row.op in DEALS and row.kind == "a tensor"]
    rows = [row for row in rows if row.place.rpartition(":")[0] in functions]
    rows = [row for row in rows if only is None or row.line in only]
    num_bytes = sum(row.bytes_per_step for row in rows)
    # As many bytes as the model's are its weights: of a teacher, or of replicas that are held equal.
    are_weights = math.isclose(num_bytes, parameter_bytes(judged.noted), rel_tol=AS_MANY)
    is_batch = num_bytes >= DEALT_BYTES and not are_weights
    return {"origin": "dealt", "dealt_bytes": num_bytes, "dealt_at": rows[0].place} if is_batch else {}


def _sent_to_host(judged: Run, paths: list[list[StackFrame]], ms: float) -> dict[str, Any]:
    """Facts of code that copies tensors and works on them, where the device's copies to the host are enough
    of it: of single values they take no time."""
    to_host = [kind for kind in operations(judged.metrics, COPY_TIME) if kind.startswith("device_to_p")]
    copied_ms = sum(judged.mean_of(of_operation(COPY_TIME, kind)) or 0.0 for kind in to_host)
    num = sum(bool(TO_HOST.search(path[-1].function)) for path in paths)
    if num < COPYING * len(paths) or copied_ms < LARGE * ms:
        return {}
    return {
        "origin": "sent_to_host",
        "what": f"{OWN}, which copies tensors to the host,",
        "copied_ms": copied_ms,
    }


def own_of_rank(judged: Run, account: Account) -> CauseFinding | None:
    """What one rank's thread on a CPU is in and hardly any other's, while these wait for it in any phase and
    any collective, also in one that is not split by arrival, as the broadcast of DDP's buffers."""
    whole, num_ranks = judged.whole, len(judged.ranks)
    samples = timed_samples_of_all(judged)
    if account.on_device or has_point_to_point(judged) or len(samples) < 2:
        return None
    loops = {function for one in samples for function in loops_of(one)}
    waits = Seen.where(samples, _waits)
    own = Seen.where(samples, lambda one: ~(_waits(one) | _is_of_all(one)))
    only = [list[int]() for _ in samples]
    for seen in own.by(lambda path: _group_of(path, loops, with_model=True)[1]).values():
        share = seen.shares()[0]
        worst = int(share.argmax())
        is_others = of_the_others(share[:, None])[worst, 0] > ALSO_OTHERS * share[worst]
        if not is_others and not seen.are_alike():
            only[worst] += seen.of[worst][1]
    own_part, waited = Seen(samples, only).shares()[0], waits.shares()[0]
    worst = int(own_part.argmax())
    longer = float(of_the_others(waited[:, None])[worst, 0] - waited[worst])
    others = [(one, rows) for one, rows in waits.of if one is not samples[worst]]
    # In a function that the others are never in, such as one that calls the model once more.
    theirs = [stack for one, _ in others for stack in one.chosen(one.is_judged, -1e-9)]
    line = heaviest([*samples[worst].chosen(only[worst]), *theirs])
    if line is None or len(only[worst]) < FEWEST or longer < own_part[worst] / 2:
        return None
    waited_in = heaviest([stack for one, rows in others for stack in one.chosen(rows)])
    ms, num = Seen([samples[worst]], [only[worst]]).common_ms(whole, account)
    facts: dict[str, Any] = {"who": f"rank {judged.ranks[worst]}", "op": "own", "own_ms": float(ms.mean())}
    facts["at"] = line
    facts["waited_ms"] = longer * account.mean_step_ms
    facts["waited_in"] = None if waited_in is None else f"{waited_in.calls} ({waited_in.text})"
    ms *= min(longer / own_part[worst], 1.0)
    of_own = samples[worst].ms[only[worst]]
    is_behind = 2 * of_own[samples[worst].at("behind_body")[only[worst]]].sum() > of_own.sum()
    # Of what grows, steps that were not recorded have the most.
    cells = ("unrecorded", *(("between_steps",) if is_behind else ()), *CPU_CELLS)
    takes = {(*WAIT, "unrecorded"): 1 - 1 / num_ranks, cells: 1 / num_ranks}
    return CauseFinding("late_rank", ms, takes, facts, rank=judged.ranks[worst], num_samples=num)


def _waits(one: Samples) -> Flags:
    return one.in_phase("communication") | (one.that("sleeps") & one.leaf_in("torch"))


def _is_of_all(one: Samples) -> Flags:
    """What has causes of its own, and backward passes and updates, which all ranks make: one that takes
    longer in them has more work, or a slower core. Not what the program does within these."""
    in_library = one.leaf_is(lambda frame: not frame.is_program)
    is_made_by_all = one.in_phase("backward", "optimizer") & in_library
    return one.in_phase("data", "checkpoint", "evaluation") | is_made_by_all


def _libraries(paths: list[list[StackFrame]]) -> str | None:
    """Of the samples that are not in the program itself, values: some make tensors of Python's values, and
    few are in other operators; operators: most are in functions of torch or methods of tensors; python: in
    others. None where all are in the program itself."""
    called = [path[-1] for path in paths if not path[-1].is_program]
    if _is_no_loss(paths) and any(leaf.function in OF_VALUES for leaf in called):
        return "values"
    is_operators = 2 * sum(map(is_of_torch, called)) > len(called)
    return "operators" if is_operators else "python" if called else None


def code_in_model(judged: Run) -> tuple[StackFrame, float] | None:
    """The line of the function that computes by itself for longest, in forward and backward passes and the
    optimizer, and ms of a step in that function: with numpy or Python, or in a hook of a backward pass. None
    where samples show none. What calls torch's functions forward is the model, in lines that were counted."""
    samples = samples_of_ranks(judged.whole)
    operators = operators_of(judged)
    by_function: dict[Function, dict[StackFrame, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[Function, int] = defaultdict(int)
    for one in samples:
        is_own = one.is_judged & one.leaf_in("", "numpy") & ~one.that("locked_out")
        is_own &= one.in_phase("backward") | one.in_phase("forward", "optimizer") & ~one.leaf_is(is_of_torch)
        for row in np.flatnonzero(is_own).tolist():
            frame = _computes_by_itself(one.path(row), operators)
            if frame is not None:
                counts[frame.function_id] += 1
                by_function[frame.function_id][frame] += float(one.ms[row]) / len(samples)
    largest = max(by_function, key=lambda key: sum(by_function[key].values()), default=None)
    if largest is None or counts[largest] < FEWEST:
        return None
    lines = by_function[largest]
    return max(lines, key=lines.__getitem__), sum(lines.values())


def _computes_by_itself(path: list[StackFrame], operators: set[Line]) -> StackFrame | None:
    """The line of the program's innermost function, if that is not the model, in one of these lines, or the
    loop; of what a backward pass calls (a hook, an autograd.Function) the line in that, which has what it
    calls."""
    passes = [
        place for place, frame in enumerate(path) if frame.file == "torch" and BACKWARD in frame.function
    ]
    called = [frame for frame in path[passes[-1] :] if frame.is_program] if passes else []
    if called and _name(called[0]) not in PASSES:
        return called[0]
    own = [frame for frame in path if frame.is_program][-1:]
    is_counted = operators and own and (own[0].file, own[0].line) not in operators
    of_model = {BACKWARD, *PASSES[1 if is_counted else 0 :]}
    return own[0] if own and _name(own[0]) not in of_model else None


def _name(frame: StackFrame) -> str:
    return frame.outer_function.rpartition(".")[2]


def loops_of(samples: Samples) -> Iterator[Function]:
    """Functions of the program that call backward or the optimizer."""
    which = samples.is_judged & samples.in_phase("backward", "optimizer")
    for node in set(samples.rows[which, 5].tolist()):
        own = [frame for frame in samples.stacks.path(node) if frame.is_program]
        if own:
            yield own[-1].function_id


def _in_both(samples: list[Samples]) -> set[Line]:
    """Lines in which both passes are: they call a library's loop."""
    forward = Seen.where(samples, lambda one: one.in_phase("forward")).lines
    return forward & Seen.where(samples, lambda one: one.in_phase("backward")).lines


def _groups(samples: Samples, loops: set[Function]) -> Groups:
    """Rows of samples by what the loop calls; of its own lines by line. A line is one with what it alone
    calls, where it makes a tensor of that and no loss: Python lets go of its lock there, so that samples come
    then which waited for it before. Not the call of a library's loop, which has samples of its own."""
    is_apart = samples.in_phase("rest") | (samples.in_phase("forward") & samples.leaf_in(*METRIC_MODULES))
    which = samples.is_judged & samples.at("body") & is_apart & samples.that("runs")
    groups: dict[Group, list[int]] = defaultdict(list)
    callers: dict[Group, set[Group]] = defaultdict(set)
    for row in np.flatnonzero(which).tolist():
        line, group = _group_of(samples.path(row), loops)
        if group is not None:
            groups[group].append(row)
            callers[group].add(line or group)
    in_both = _in_both([samples])
    for group, (line, *others) in callers.items():
        if (Path(line[0]).name, line[2]) in in_both:
            continue
        if group != line and not others and _is_no_loss(Seen([samples], [groups.get(line, [])]).paths):
            groups[line] += groups.pop(group)
    return groups


def _in_stretches(
    judged: Run, samples: list[Samples], grouped: list[Groups], loops: set[Function], of_loss: range
) -> list[Groups]:
    """With lines that are Python as one where no pass is between them, and the lines of a loop within the
    step: each may have too few samples. of_loss: lines between the model and its backward pass, where
    operators in a loop may be the loss. Before these a function is one with the lines that make tensors of
    what it gives, as in _groups."""
    passes: dict[Function, set[int]] = defaultdict(set)
    for path in Seen.where(samples, lambda one: one.in_phase("forward", "backward", "optimizer")).paths:
        for frame in path:
            passes[frame.function_id].add(frame.line)
    trees = {file: source.tree for file, _ in passes if (source := source_of(file, judged.noted)) is not None}

    def stretch_of(line: Group) -> Group:
        before = (call for call in passes[line[:2]] if call < line[2])
        return (*line[:2], -max(before, default=1))

    def block_of(line: Group) -> Group | None:
        for loop in loops_around(trees[line[0]], line[2]) if line[0] in trees else []:
            lines = range(loop.lineno, (loop.end_lineno or 0) + 1)
            if not passes[line[:2]].intersection(lines):
                return (*line[:2], -loop.lineno)
        return None

    found: list[Groups] = [defaultdict(list, groups) for groups in grouped]
    within: dict[Group, Group] = {}

    def paths_of(group: Group) -> list[list[StackFrame]]:
        return Seen(samples, (each[group] for each in found)).paths

    def join(group: Group, into: Group) -> None:
        for each in found:
            each[into] += each.pop(group, [])

    for line in sorted({group for groups in grouped for group in groups if group[2] > 0}):
        if line[2] in passes[line[:2]]:
            continue
        block = block_of(line) if line[2] not in of_loss else None
        if block is not None:
            within[block] = stretch_of(line)
        if block is not None or _is_no_loss(paths_of(line)):
            join(line, block or stretch_of(line))
    for group in sorted({group for groups in grouped for group in groups if not group[2]}):
        lines = {_group_of(path, loops)[0] for path in paths_of(group)}
        stretch, *more = {stretch_of(line) if line and line[2] < of_loss.start else None for line in lines}
        if stretch and not more and any(path[-1].function in OF_VALUES for path in paths_of(stretch)):
            within[group] = stretch
    for group, stretch in within.items():
        if _are_mostly_python(paths_of(group)):
            join(group, stretch)
    return [{group: rows for group, rows in each.items() if rows} for each in found]


def _are_mostly_python(paths: list[list[StackFrame]]) -> bool:
    return 2 * sum(path[-1].is_program or _is_python(path[-1]) for path in paths) > len(paths)


def _line_of_entries(judged: Run, seen: Seen, are_lines: bool) -> CodeLine | None:
    """Where most of it is, if that is Python that goes through one entry after the other. Python lets go of
    its lock behind a loop, so that samples of that come late: are_lines of a function, of which then the loop
    is meant."""
    found = heaviest(seen.stacks)
    source = None if found is None else source_of(found.file, judged.noted)
    if found is None or source is None or not _are_mostly_python(seen.paths):
        return None
    function = found.file, found.function
    lines = {frame.line for path in seen.paths for frame in path if frame.function_id == function}
    lines = {line for line in lines if goes_through(source.tree, line) in ("entries", "nested")}
    in_loop = [
        stack
        for stack in seen.stacks
        if any(frame.function_id == function and frame.line in lines for frame in stack.frames)
    ]
    at = heaviest(in_loop)
    is_enough = sum(stack.ms for stack in in_loop) >= LATE * sum(stack.ms for stack in seen.stacks)
    if at is None or at.function != found.function or not (found.line == at.line or are_lines and is_enough):
        return None
    of_line = {name: getattr(at, name) for name in ("line", "text", "calls", "entry", "doing")}
    return msgspec.structs.replace(found, **of_line)


def _is_python(leaf: StackFrame) -> bool:
    """Whether it is none of torch's operators, or makes a tensor of Python's values; False of a line of the
    program, which may be an operator's sign."""
    return not leaf.is_program and (leaf.function in OF_VALUES or not _may_be_torchs(leaf))


def _is_no_loss(paths: list[list[StackFrame]]) -> bool:
    """Whether more of them make tensors of Python's values, or are in libraries beside torch, than in
    operators, as a loss is that the loop itself computes."""
    called = [path[-1] for path in paths if not path[-1].is_program]
    return 2 * sum(map(_is_python, called)) > len(called)


def _called_in(paths: list[list[StackFrame]], loop: str) -> str | None:
    """The program's function beside the loop that most samples of a line of it are in."""
    inner = [one for one in map(innermost, paths) if one and one.outer_function not in (loop, "<listcomp>")]
    called = Counter(one.text.rpartition(":")[0] for one in inner)
    return next((name for name, num in called.most_common(1) if num >= FEWEST), None)


def _group_of(
    path: list[StackFrame], loops: set[Function], with_model: bool = False
) -> tuple[Group | None, Group | None]:
    """A line of the loop, and what it calls or the line itself; None of neither, and but with_model of the
    model, which some call by its forward()."""
    own = [frame for frame in path if frame.is_program]
    leaf = path[-1]
    if not own or is_a_loss(leaf) or (leaf.file == "torch" and leaf.function in NOT_OWN):
        return None, None
    inside = [place for place, frame in enumerate(own) if frame.function_id in loops]
    called = own[inside[-1] + 1 :] if inside else own
    if not with_model and any(_name(frame) == "forward" for frame in called):
        return None, None
    frame = own[inside[-1]] if inside else own[0]
    line = (*frame.function_id, frame.line) if inside else None
    return line, (*called[0].function_id, 0) if called else line


def _are_most_in(steps: Flags, samples: Samples, rows: list[int]) -> bool:
    ms = samples.ms[rows]
    return float(ms[steps[samples.column[rows]]].sum()) >= MOST_IN_SLOW * float(ms.sum())
