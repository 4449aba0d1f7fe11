"""What hooks and wrappers do within passes and optimizers, by sampled stacks: DDP's hook for gradients, the
program's own code that a library calls within an optimizer's step, and DataParallel's copies."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from aorta.account.judge.cells import Account
from aorta.account.judge.stacks import (
    MOST_RANKS,
    Samples,
    innermost,
    is_a_loss,
    is_of_torch,
    samples_of_ranks,
    timed_samples_of,
)
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.records.stacks import StackFrame
from aorta.timeline.collective import busbw_factor
from aorta.why.causes.finding import WAIT, CauseFinding
from aorta.why.causes.losses.program_code import (
    BACKWARD,
    CPU_CELLS,
    DEVICE_CELLS,
    FEWEST,
    LARGE,
    LEAST,
    OWN,
    common_ms,
    places_of_steps,
)
from aorta.why.causes.losses.transfer import best_busbw
from aorta.why.causes.program import noted_modes, noted_program

TRAINS = "training_step"
"""What Lightning calls for the loss, within the optimizer's step: operators there may be the model's."""
OF_AN_OPTIMIZER = ("step", "closure")
"""Functions of the program that are an optimizer, or compute its loss."""
REPLICATES = re.compile(r"replicate$|Module\._replicate_for_data_parallel")
OF_COPIES = re.compile(
    rf"{REPLICATES.pattern}|_?broadcast_coalesced|scatter|DataParallel\.|(Scatter|Broadcast|Gather)\."
)
"""Functions of torch's DataParallel that move tensors between devices; of the first alone it is known."""
Function = tuple[str, str]


def code_in_hooks(judged: Run, account: Account, losses: list[CauseFinding]) -> Iterator[CauseFinding]:
    """Before all else that would explain the same time. Messages of a hook are its own: they leave the
    losses."""
    whole, ranks = judged.whole or judged, judged.ranks[:MOST_RANKS]
    samples = samples_of_ranks(whole, timed_samples_of)
    if len(samples) < len(ranks):
        return
    cells = DEVICE_CELLS if account.on_device else CPU_CELLS
    for rows, facts, first in (
        _of_gradients(judged, samples),
        _of_optimizers(samples),
        _of_data_parallel(samples),
        _of_modules(samples) if not account.on_device else ([], {}, ()),
    ):
        if not rows or not all(len(chosen) >= FEWEST for chosen in rows):
            continue
        ms, num = common_ms(samples, rows, account, places_of_steps(whole, account))
        facts[f"{facts['op']}_ms"] = float(ms.mean())
        ms = positive(ms - float(facts.get("plain_ms", 0.0)))  # type: ignore[arg-type]
        if ms.mean() >= (LEAST if "is_least" in facts else LARGE) * account.mean_step_ms:
            if facts["op"] == "comm_hook":
                losses[:] = [one for one in losses if not _is_of_a_hook(one)]
            takes = {(*first, *cells, *WAIT, "transfer"): 1.0}
            yield CauseFinding("program_code", ms, takes, facts=facts, num_samples=num)


def _is_of_a_hook(one: CauseFinding) -> bool:
    return one.kind == "small_messages" and one.facts.get("origin") in (None, "bucket")


_Rows = tuple[list[list[int]], dict[str, object], tuple[str, ...]]
"""By rank, rows of samples; facts, and the cells that hold it first."""


def _of_gradients(judged: Run, samples: list[Samples]) -> _Rows:
    """What DDP's hook for gradients does. Without it they are reduced as they are, at the rate of the run's
    fastest calls."""
    modes, wrappers = noted_modes(judged.noted), noted_program(judged.noted).get("wrappers") or []
    if not modes.get("comm_hook") or not wrappers or "optim" in (modes.get("comm_hook_name") or ""):
        return [], {}, ()  # of one that updates weights as well nobody knows how long that takes
    rows = [
        [
            row
            for row in np.flatnonzero(one.is_judged & one.in_phase("backward")).tolist()
            if is_in_hook(one.stacks.path(int(one.rows[row, 5])), modes.get("comm_hook_name"))
        ]
        for one in samples
    ]
    num_bytes, rate = sum(row.get("parameter_bytes") or 0 for row in wrappers), best_busbw(judged)
    name, at = modes.get("comm_hook_name"), modes.get("comm_hook_at")
    calls = next((_calls(one, of) for one, of in zip(samples, rows, strict=True) if of), None)
    facts: dict[str, object] = {
        "op": "comm_hook",
        "what": f"DDP's communication hook{'' if name is None else f' {name}()'}",
        "at": calls if at is None else StackFrame(at[0], at[1], "<module>", True),
        "gradient_bytes": num_bytes,
        "plain_ms": num_bytes * busbw_factor("all_reduce", len(judged.ranks)) / rate / 1e6,
        "rate": rate,
    }
    return rows, facts, WAIT if judged.source == "host" else ("launch",)


def _of_modules(samples: list[Samples]) -> _Rows:
    """Hooks of the program in forward passes, of the function with most of them."""
    by_function: dict[Function, list[list[int]]] = defaultdict(lambda: [[] for _ in samples])
    lines: Counter[StackFrame] = Counter()
    for number, one in enumerate(samples):
        for row in np.flatnonzero(one.is_judged & one.in_phase("forward")).tolist():
            hook = _hook_of_module(one.stacks.path(int(one.rows[row, 5])))
            if hook is not None:
                by_function[hook.file, hook.function][number].append(row)
                lines[hook] += 1
    most = max(by_function, key=lambda key: sum(map(len, by_function[key])), default=None)
    if most is None:
        return [], {}, ()
    at = max((line for line in lines if (line.file, line.function) == most), key=lines.__getitem__)
    facts: dict[str, object] = {"op": "in_hooks", "origin": "in_hooks", "what": OWN, "at": at}
    return by_function[most], facts, ()


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


def _of_data_parallel(samples: list[Samples]) -> _Rows:
    """What one process for several devices copies to and from the others in each step: weights, inputs,
    outputs and gradients. That its threads take turns with Python comes on top."""
    rows = [
        np.flatnonzero(one.is_judged & one.leaf_in("torch") & one.leaf_is(_copies)).tolist()
        for one in samples
    ]
    if not all((one.is_judged & one.leaf_is(_replicates)).any() for one in samples):
        return [], {}, ()
    facts: dict[str, object] = {
        "op": "data_parallel",
        "what": "weights sent to each device by DataParallel",
        "is_least": True,
        "at": next((_calls(one, of) for one, of in zip(samples, rows, strict=True) if of), None),
    }
    return rows, facts, ()


def _copies(leaf: StackFrame) -> bool:
    return OF_COPIES.match(leaf.function) is not None


def _replicates(leaf: StackFrame) -> bool:
    return leaf.file == "torch" and REPLICATES.match(leaf.function) is not None


def _calls(samples: Samples, rows: list[int]) -> StackFrame | None:
    """The innermost line of the program in the first of these samples."""
    return innermost(samples.stacks.path(int(samples.rows[rows[0], 5])))


def _of_optimizers(samples: list[Samples]) -> _Rows:
    """What a library calls of the program within an optimizer's step, of the function with most of it: not an
    optimizer of the program's own, nor what computes its loss, which backward passes are in as well."""
    by_function: dict[Function, list[list[int]]] = defaultdict(lambda: [[] for _ in samples])
    lines: dict[Function, StackFrame] = {}
    passes = set()
    for number, one in enumerate(samples):
        paths = {node: one.stacks.path(node) for node in set(one.rows[one.is_judged, 5].tolist())}
        for row in np.flatnonzero(one.is_judged & one.in_phase("forward", "backward")).tolist():
            at = innermost(paths[int(one.rows[row, 5])])
            passes |= set() if at is None else {(at.file, at.outer_function)}
        for row in np.flatnonzero(one.is_judged & one.in_phase("optimizer")).tolist():
            path = paths[int(one.rows[row, 5])]
            last = max((place for place, frame in enumerate(path) if frame.is_program), default=0)
            library = max(
                (place for place, frame in enumerate(path[:last]) if not frame.is_program), default=last
            )
            called = path[library + 1 : last + 1]
            names = {frame.outer_function.rpartition(".")[2] for frame in called}
            is_loss = is_a_loss(path[-1]) or (TRAINS in names and is_of_torch(path[-1]))
            if called and names.isdisjoint(OF_AN_OPTIMIZER) and not is_loss:
                key = called[0].file, called[0].outer_function
                by_function[key][number].append(row)
                lines.setdefault(key, called[0])
    found = {key: rows for key, rows in by_function.items() if key not in passes}
    most = max(found, key=lambda key: sum(map(len, found[key])), default=None)
    if most is None:
        return [], {}, ()
    facts: dict[str, object] = {"op": "in_update", "origin": "in_update", "what": OWN, "at": lines[most]}
    return found[most], facts, ("optimizer",)
