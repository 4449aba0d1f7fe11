"""What hooks and wrappers do within passes and optimizers, by sampled stacks: DDP's hook for gradients, the
program's own code that a library calls within an optimizer's step, and DataParallel's copies."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from aorta.account.judge.cells import Account
from aorta.account.judge.stacks import (
    FEWEST,
    Samples,
    innermost,
    is_a_loss,
    is_of_torch,
    timed_samples_of_all,
)
from aorta.account.load.measures import noted_modes, noted_program
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.records.stacks import StackFrame
from aorta.timeline.collective import busbw_factor
from aorta.why.causes.finding import WAIT, CauseFinding
from aorta.why.causes.losses.host_needs import MOSTLY_IDLE
from aorta.why.causes.losses.kernels_by_name import TAKES, beside_model_ms
from aorta.why.causes.losses.parts import work_ms_of
from aorta.why.causes.losses.program_code import (
    BACKWARD,
    CPU_CELLS,
    DEVICE_CELLS,
    LARGE,
    LEAST,
    OWN,
    loops_of,
)
from aorta.why.causes.losses.seen import Seen
from aorta.why.causes.losses.transfer import best_busbw
from aorta.why.causes.program import noted_line
from aorta.why.causes.source import loops_around, pieces_of_run, source_of

REGISTERS = re.compile(r"[^=\s]*\.register_\w*hook\(")
REMOVES = re.compile(r"[^=\s]*\.remove\(\)")
"""Calls of hooks and of their handles."""
TRAINS = "training_step"
"""What Lightning calls for the loss, within the optimizer's step: operators there may be the model's."""
OF_AN_OPTIMIZER = ("step", "closure")
"""Functions of the program that are an optimizer, or compute its loss."""
REPLICATES = re.compile(r"replicate$|Module\._replicate_for_data_parallel")
OF_COPIES = re.compile(
    rf"{REPLICATES.pattern}|_?broadcast_coalesced|scatter|DataParallel\.|(Scatter|Broadcast|Gather)\."
)
"""Functions of torch's DataParallel that move tensors between devices; of the first alone it is known."""


def code_in_hooks(judged: Run, account: Account, losses: list[CauseFinding]) -> Iterator[CauseFinding]:
    """Before all else that would explain the same time. Messages of a hook are its own: they leave the
    losses."""
    whole, samples = judged.whole, timed_samples_of_all(judged)
    if not samples:
        return
    cells = DEVICE_CELLS if account.on_device else CPU_CELLS
    for seen, facts, first in (
        _of_gradients(judged, samples),
        _of_optimizers(samples),
        _of_data_parallel(samples),
        _of_modules(judged, samples),
    ):
        if seen.fewest < FEWEST:
            continue
        ms, num = seen.common_ms(whole, account)
        facts[f"{facts['op']}_ms"] = float(ms.mean())
        if facts["op"] == "in_hooks" and account.on_device and account.share("launch") < MOSTLY_IDLE:
            if ms.mean() >= LARGE * account.mean_step_ms:
                yield from _launched_in_hooks(judged, account, facts)
            continue
        ms = positive(ms - float(facts.get("plain_ms", 0.0)))  # type: ignore[arg-type]
        if ms.mean() >= (LEAST if "is_least" in facts else LARGE) * account.mean_step_ms:
            if facts["op"] == "comm_hook":
                losses[:] = [one for one in losses if not _is_of_a_hook(one)]
            takes = {(*first, *cells, *WAIT, "transfer"): 1.0}
            yield CauseFinding("program_code", ms, takes, facts=facts, num_samples=num)


def _is_of_a_hook(one: CauseFinding) -> bool:
    return one.kind == "small_messages" and one.facts.get("origin") in (None, "bucket")


_Hooks = tuple[Seen, dict[str, object], tuple[str, ...]]
"""Samples in them; facts, and the cells that hold it first."""
NOTHING: _Hooks = Seen([], []), {}, ()


def _of_gradients(judged: Run, samples: list[Samples]) -> _Hooks:
    """What DDP's hook for gradients does. Without it they are reduced as they are, at the rate of the run's
    fastest calls."""
    modes, wrappers = noted_modes(judged.noted), noted_program(judged.noted).get("wrappers") or []
    if not modes.get("comm_hook") or not wrappers or "optim" in (modes.get("comm_hook_name") or ""):
        return NOTHING  # of one that updates weights as well nobody knows how long that takes
    name, at = modes.get("comm_hook_name"), modes.get("comm_hook_at")
    seen = Seen.where(samples, lambda one: one.in_phase("backward"))
    seen = seen.that(lambda path: is_in_hook(path, name))
    num_bytes, rate = sum(row.get("parameter_bytes") or 0 for row in wrappers), best_busbw(judged)
    facts: dict[str, object] = {
        "op": "comm_hook",
        "what": f"DDP's communication hook{'' if name is None else f' {name}()'}",
        "at": noted_line(at) or seen.first,
        "gradient_bytes": num_bytes,
        "plain_ms": num_bytes * busbw_factor("all_reduce", len(judged.ranks)) / rate / 1e6,
        "rate": rate,
    }
    return seen, facts, WAIT if judged.source == "host" else ("launch",)


def _of_modules(judged: Run, samples: list[Samples]) -> _Hooks:
    """Hooks of the program in forward passes, of the function with most of them."""
    by_function = Seen.where(samples, lambda one: one.in_phase("forward")).by(
        lambda path: None if (hook := _hook_of_module(path)) is None else (hook.file, hook.function)
    )
    seen = max(by_function.values(), key=lambda one: one.num, default=None)
    if seen is None:
        return NOTHING
    at = Counter(map(_hook_of_module, seen.paths)).most_common(1)[0][0]
    registered = _registered_in(judged, samples, seen)
    facts = {"op": "in_hooks", "what": OWN, "at": at, "registered": registered}
    return seen, dict[str, object](facts), ()


def _launched_in_hooks(judged: Run, account: Account, facts: dict[str, object]) -> Iterator[CauseFinding]:
    """Where the device is busy no sample shows what it computes for them: no more than the kernels that
    memory bounds, but for those of the model."""
    most_ms = beside_model_ms(judged)
    if most_ms is not None and most_ms > 0:
        facts |= {"is_most": True, "not_known": "what of it are other kernels", "beside_ms": most_ms}
        ms = np.full_like(work_ms_of(account), most_ms)
        yield CauseFinding("program_code", ms, TAKES, facts=facts)


def _registered_in(judged: Run, samples: list[Samples], seen: Seen) -> str | None:
    """The line of the program that registers hooks in each step: in the loop of steps, or in a function that
    it calls before these hooks run. None where the program removes any."""
    pieces = pieces_of_run(judged)
    if any(REMOVES.match(one.text) for one in pieces):
        return None
    loops = {function for one in samples for function in loops_of(one)}
    within, called = set(), set()
    for path in seen.paths:
        last = max((place for place, frame in enumerate(path) if frame.function_id in loops), default=None)
        if last is not None:
            within.add(path[last].function_id)
            called |= {frame.function_id for frame in path[last + 1 :] if frame.is_program}
    for one in (one for one in pieces if REGISTERS.match(one.text)):
        source = source_of(one.at.file, judged.noted) if one.at.function_id in within else None
        in_loop = source is not None and loops_around(source.tree, one.at.line, of_steps=True)
        if one.at.function_id in called or in_loop:
            return one.at.text
    return None


def _hook_of_module(path: list[StackFrame]) -> StackFrame | None:
    """What a module calls that is no forward(), and calls none."""
    found = None
    for caller, frame in pairwise(path):
        if frame.is_program and caller.file == "torch" and caller.function.endswith("call_impl"):
            found = frame
        if frame.function.rpartition(".")[2] == "forward":
            found = None
    return found


def is_in_hook(path: list[StackFrame], name: str | None) -> bool:
    """Whether a backward pass is in DDP's hook: Python of torch's that the engine calls and that is of no
    autograd.Function, or the function of this name in the program."""
    passes = [place for place, one in enumerate(path) if one.file == "torch" and BACKWARD in one.function]
    called = path[passes[-1] + 1 :] if passes else []
    if own := [frame for frame in called if frame.is_program]:
        return name is not None and any(name in frame.function for frame in own)
    return bool(called) and called[-1].file in ("torch", "") and not called[-1].function.endswith("forward")


def _of_data_parallel(samples: list[Samples]) -> _Hooks:
    """What one process for several devices copies to and from the others in each step: weights, inputs,
    outputs and gradients. That its threads take turns with Python comes on top."""
    seen = Seen.where(samples, lambda one: one.leaf_in("torch") & one.leaf_is(_copies))
    if not Seen.where(samples, lambda one: one.leaf_is(_replicates)).fewest:
        return NOTHING
    facts: dict[str, object] = {
        "op": "data_parallel",
        "what": "weights sent to each device by DataParallel",
        "is_least": True,
        "at": seen.first,
    }
    return seen, facts, ()


def _copies(leaf: StackFrame) -> bool:
    return OF_COPIES.match(leaf.function) is not None


def _replicates(leaf: StackFrame) -> bool:
    return leaf.file == "torch" and REPLICATES.match(leaf.function) is not None


def _of_optimizers(samples: list[Samples]) -> _Hooks:
    """What a library calls of the program within an optimizer's step, of the function with most of it: not an
    optimizer of the program's own, nor what computes its loss, which backward passes are in as well."""
    in_passes = Seen.where(samples, lambda one: one.in_phase("forward", "backward"))
    passes = in_passes.by(lambda path: None if (at := innermost(path)) is None else at.function_id)
    found = Seen.where(samples, lambda one: one.in_phase("optimizer")).by(
        lambda path: None if (at := _called_in_update(path)) is None else at.function_id
    )
    own = [seen for function, seen in found.items() if function not in passes]
    seen = max(own, key=lambda one: one.num, default=None)
    if seen is None:
        return NOTHING
    at = _called_in_update(seen.paths[0])
    return seen, {"op": "in_update", "what": OWN, "at": at}, ("optimizer",)


def _called_in_update(path: list[StackFrame]) -> StackFrame | None:
    """What the innermost library calls of the program that is no optimizer, and no loss."""
    last = max((place for place, frame in enumerate(path) if frame.is_program), default=0)
    library = max((place for place, frame in enumerate(path[:last]) if not frame.is_program), default=last)
    called = path[library + 1 : last + 1]
    names = {frame.outer_function.rpartition(".")[2] for frame in called}
    is_loss = is_a_loss(path[-1]) or (TRAINS in names and is_of_torch(path[-1]))
    return called[0] if called and names.isdisjoint(OF_AN_OPTIMIZER) and not is_loss else None
