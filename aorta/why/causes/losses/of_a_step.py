"""Losses that the step records of a run show; no ms of a step is in two of them.

A step's loss is waiting for ranks, exposed transfer, what all ranks spend on the host (or the device idles
for), and compute at a low clock. What one rank alone spends on the host is in the waiting of the others.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from aorta.account.cause import CauseKind
from aorta.account.judge.cells import LARGE_SHARE, Account
from aorta.account.judge.occasional import Occasions, are_alike, occasions, without_traces
from aorta.account.judge.overhead import slower_launches
from aorta.account.judge.stacks import FEWEST, Samples, in_modules, innermost, samples_of_ranks
from aorta.account.load.rank.kernels import COPY_TIME, COUNT
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import counted, quantity
from aorta.account.rows import positive
from aorta.records.stacks import StackFrame
from aorta.timeline.arrays import Flags, Floats, Ints
from aorta.why.causes.code_lines import line_of, tell_holder
from aorta.why.causes.finding import (
    ANY_CELL,
    OF_SAMPLES,
    WAIT,
    CauseFinding,
    of_the_least,
    steps_with,
    together,
)
from aorta.why.causes.losses.hooks import code_in_hooks
from aorta.why.causes.losses.host_needs import MOSTLY_IDLE, within_host_needs
from aorta.why.causes.losses.kernels_by_name import memory_used
from aorta.why.causes.losses.needless import (
    MANY_CALLS,
    bound_cores,
    idle_cores,
    lines_text,
    loop_of,
    loss_loop,
    needless_work,
)
from aorta.why.causes.losses.new_workers import with_new_workers
from aorta.why.causes.losses.parts import Parts, parts_of
from aorta.why.causes.losses.program_code import (
    EMPTY_CACHE,
    OWN,
    code_in_model,
    code_in_passes,
    fallen_back,
    lines_of_spans,
    program_code,
)
from aorta.why.causes.losses.slow_steps import slow_steps
from aorta.why.causes.losses.telemetry import MIN_OTHER_STEPS, clocks, given_back, memory_limit, retries
from aorta.why.causes.losses.transfer import Exposure, exposure, small_calls, transfer
from aorta.why.causes.losses.units import on_host
from aorta.why.causes.losses.waiting import (
    ASLEEP,
    CELLS_OF_PART,
    IN_TURN,
    PART_KINDS,
    UNLIKE_CORES,
    WORDS,
    locked_out_facts,
    unbalanced_stages,
    uneven_batches,
    waiting,
)
from aorta.why.causes.program import blocks_launches, bytes_of_optimizers, crowded_at, program_of

WORTH_SAYING = 0.1
"""Of the loss, from which on it is said what others took of the core."""
IN_MODEL = (
    "meanwhile the host runs the program's own code: no data loading, optimizer, checkpoint or wait for the"
    " device"
)
SEEN: tuple[CauseKind, ...] = (
    "checkpoint",
    "garbage_collection",
    "data_loading",
    "between_steps",
    "synchronisation",
    "memory",
)
"""Kinds that the program was seen to do."""
HOST_BOUND: tuple[CauseKind, ...] = ("launch_bound", "synchronisation", "idle", "pause")
"""Kinds of which slow steps have no more than usual, where they are slow for a reason of their own."""
SMALL = 0.4
"""Of late launches, or of what the device computes, that launching small kernels must be able to take."""
MOST_OF_STEPS = 0.5
"""Of what slow steps take longer, from which on a loss is their reason."""
ALIKE_STEPS = 0.8
"""Of the slow steps, that are the same ones."""
WAITED_MS = 0.005
"""From the end of a kernel until its host, which waits for it, has launched the next: 5.9 us in a planted
program on an H200."""
MOST_OF_OPERATORS = 0.5
"""Of a step, from which on a loop is what its launches are for."""
MOST_OF_COPIES, LEAST_OF_COPIES = 0.5, 0.05
"""Of the time in which a device only copies, from which on it is said from where and to where; and below
which the driver's copies are not what takes it."""
RECEIVES = re.compile(r"Connection\._(recv|send)")
REBUILDS = re.compile(
    r"SocketClient|_?rebuild_|fd_id|storage_from_cache|recv|answer_ch|deliver_ch|SharedCache"
)
"""Functions of multiprocessing and of torch that take what another process sends. One of RECEIVES that sleeps
may wait for the batch."""
WHOLE_BATCH_MS = 6.0
"""Twice what a batch of few tensors takes to hand over, as measured: 0.5 to 2.8 ms for 4 kB to 13 MB."""
MOST_IN_PIECES = 0.5
"""Of what loading takes, from which on handing over is what it does."""
COPIED = {
    "pageable": "memory of the host that is not pinned",
    "pinned": "pinned memory of the host",
    "host": "memory of the host",
    "device": "the device's memory",
}
CALLS_THE_MODEL = 0.25
"""Of what slow steps are longer by, that is in a module: then it may be data for an update."""
FEW_STEPS = 0.25
"""Of all, below which slow ones have a loss of their own."""
NEARLY_ALL = 0.9
"""Of full garbage collections, from which on they are of the batches that they come with."""
RARE = 0.5
"""Median over mean, below which a loss is in few steps."""
DDP = "DistributedDataParallel"
IDLES_OR_WAITS = "idles, or waits for a rank in a collective behind which nothing is launched yet,"
NOT_RECORDED = "these records do not show what the host does meanwhile"


def findings(
    judged: Run, account: Account, slow: Occasions | None = None, rare: Occasions | None = None
) -> list[CauseFinding]:
    """What is lost; some of it too little to name. Where two would explain the same ms of a cell, the first
    has them.

    judged: the steps of the account. slow: those of them that are slow by the length of all steps. rare: slow
    ones of all steps, which have a cause of their own.
    """
    details = exposure(judged)
    launching_ms = 0.0 if details is None or not small_calls(judged, details) else details.small_launch_ms
    parts = parts_of(judged, account, launching_ms)
    step_ms = parts.step_ms.mean(axis=0)
    exposed = account.exposed
    bound = [*bound_cores(judged, account)]
    losses: list[CauseFinding] = [*bound] if account.on_device else []  # what holds up the host comes first
    if details is not None and details.units is not None:
        losses += on_host(details.units, details.unit_launch_ms, judged, account)
    if exposed is not None:
        # The clock has all of its loss below.
        waits = [finding for finding in waiting(judged, parts, exposed) if finding.kind != "clock"]
        told = {finding.rank for finding in waits if finding.kind == "imbalance"} - {None}
        losses += (one for one in uneven_batches(judged, parts, exposed) if one.rank not in told)
        losses += waits
        losses += unbalanced_stages(judged, parts, exposed)
        losses += transfer(judged, parts, exposed, details)
    losses += given_back(judged, parts)
    for find in (loss_loop, needless_work, idle_cores):
        losses += find(judged, account)
    losses += [] if account.on_device else bound
    losses = [*within_host_needs(judged, account, losses)]
    losses += code_in_passes(judged, account, losses)
    of_slow_steps = [*slow_steps(judged, parts, slow)]
    of_code = [*program_code(judged, account, _own_slow_steps(judged, account, of_slow_steps, rare))]
    _leave_to_trials(judged, account, losses, of_code)
    losses = _with_their_lines(losses, of_code)
    of_all_ranks = [*_of_all_ranks(judged, parts)]
    if any("between_ms" in one.facts for one in losses):  # that time has its reason
        of_all_ranks = [one for one in of_all_ranks if one.kind != "between_steps"]
    of_all_ranks = _collected_for_batches(judged, of_all_ranks)
    losses = _with_common(losses, [*of_code, *of_all_ranks])
    if blocks_launches(judged):
        for finding in losses:
            if finding.kind == "launch_bound":
                _as_long_as_kernels(finding, judged, account)
    else:
        losses = _without_its_nature(losses, parts, code_in_model(judged))
    for finding in of_slow_steps:
        assert finding.occasions is not None
        if parts.on_device:
            _leave_to(finding.occasions.is_slow, [one for one in losses if one.kind in HOST_BOUND])
        losses = [one for one in losses if finding.kind != "checkpoint" or one.kind != "checkpoint"]
        losses.append(finding)
    for finding in losses:
        if finding.kind == "copy":
            finding.facts |= _copied(judged, finding.mean_ms) | {"op": None}
        if finding.kind in ("copy", "synchronisation"):
            finding.facts |= _saved_on_cpu(judged)
        if finding.kind == "optimizer":
            finding.facts |= _offloaded(judged)
        if finding.facts.get("op") == "locked_out":
            tell_holder(finding, judged)
            finding.more_ms = _beside_the_lock_ms(finding, judged, parts)
        finding.slow_steps = slow if finding.kind in SEEN else None
    losses = with_new_workers(judged, parts, losses)
    losses = _whole_steps(losses, step_ms, account.global_step)
    losses = _one_of_small_messages(judged, account, losses, details)
    losses = _one_of_small_units(judged, losses, details)
    losses = _one_of_a_program(judged, losses)
    losses = _one_of_a_line(judged, losses)
    _leave_to_rows(losses)
    _tell_of_cupti(judged, losses)
    losses += clocks(judged, parts)
    for finding, is_retry in retries(judged, step_ms):
        if finding.ms.any():
            _leave_to(is_retry > 0, losses)
        losses.append(finding)
    losses += memory_limit(judged)
    losses += fallen_back(judged, account)  # what others explain is not in it
    return [*code_in_hooks(judged, account, losses), *losses]


def _with_their_lines(losses: list[CauseFinding], of_code: list[CauseFinding]) -> list[CauseFinding]:
    """Without what objects take to move, where samples show their line, which has that in it."""
    seen = [one for one in of_code if one.kind == "transfer"]
    if not seen:
        return losses
    moved = [one for one in losses if one.kind == "transfer" and one.facts.get("origin") == "object"]
    for finding in seen:
        finding.ms = np.maximum(finding.ms, sum(one.ms for one in moved))
    return [one for one in losses if one not in moved]


def _leave_to_trials(
    judged: Run, account: Account, losses: list[CauseFinding], of_code: list[CauseFinding]
) -> None:
    """torch empties its cache behind the kernels that cuDNN tries for a size: what is given back is of these,
    where the program empties none, and what launches take longer by it tells what they cost."""
    trials = next((one for one in of_code if one.facts.get("origin") == "cudnn_benchmark"), None)
    if trials is None:
        return
    freed = next((one for one in losses if one.facts.get("op") == "given_back"), None)
    if any(one.that_call(EMPTY_CACHE).any() for one in samples_of_ranks(judged.whole)):
        freed = None  # it is the program's own
    is_large = freed is not None and freed.mean_ms >= LARGE_SHARE * account.mean_step_ms
    if not is_large and "sizes" not in trials.facts:
        of_code.remove(trials)  # nothing shows that there are any
    elif freed is not None:
        losses.remove(freed)
        if is_large:
            trials.ms, trials.takes = freed.ms, freed.takes
            trials.facts["num_freed"] = freed.facts["num_frees"]


def _own_slow_steps(
    judged: Run, account: Account, of_slow_steps: list[CauseFinding], rare: Occasions | None
) -> tuple[Occasions, Ints] | None:
    """A few slow steps that hold more than calls of the model, and of which steps: what the program does in
    these alone is known by their lengths, which tell it better than samples."""
    whole = judged.whole
    found = [(one.occasions, account.global_step) for one in of_slow_steps]
    for slow, known in [(rare, whole.global_step[whole.judged_steps]), *found]:
        if slow is not None and slow.is_slow.mean() < FEW_STEPS:
            is_of_model = in_modules(judged, known[slow.is_slow], known[~slow.is_slow]) >= CALLS_THE_MODEL
            return None if is_of_model else (slow, known)
    return None


def _without_its_nature(
    losses: list[CauseFinding], parts: Parts, in_model: tuple[StackFrame, float] | None
) -> list[CauseFinding]:
    """Launches come late where the device has many small kernels, which fewer launches mend. Where it has
    not, or a loop that waits for each value has launched them, the host is slow at what the program is made
    of (wrappers, Python, a slow core): the account says so, and no cause. Of that, what comes behind the
    optimizer is the program's own code, and so is what comes while the host is in a function of it
    that computes by itself (in_model: its line, and ms of a step)."""
    small_ms = parts.small_kernels_ms
    late = [finding for finding in losses if finding.kind == "launch_bound"]
    if small_ms is None or not late:
        return losses
    busy_ms = parts.account.mean_ms("compute", "hidden")
    is_loop = parts.loops_ms >= LARGE_SHARE * parts.account.mean_step_ms
    if not is_loop and small_ms >= SMALL * min(sum(finding.mean_ms for finding in late), busy_ms):
        return losses
    kept = [finding for finding in losses if finding.kind != "launch_bound"]
    own = [finding for finding in kept if finding.kind == "program_code"]
    late_ms = np.sum([finding.ms for finding in late], axis=0)
    behind_ms = parts.behind_update * late_ms
    if in_model is not None and in_model[1] >= max(SMALL * late_ms.mean(), behind_ms.mean()):
        at, seen_ms = in_model
        facts = {
            **late[-1].facts,
            "what": OWN,
            "behind": f"the device idles with nothing queued while the host is in {at.text}, within passes of"
            f" the model: samples of its thread show {quantity(seen_ms, 'ms')} of a step there",
            "origin": "in_model",
            "at": at,
        }
        facts.pop("part_ms", None)
        part = min(seen_ms / float(late_ms.mean()), 1.0)
        return [*kept, CauseFinding("program_code", part * late_ms, together(late), facts=facts)]
    of_loop = late[-1].facts.get("loop_part", 0.0)
    if of_loop and late[-1].facts["origin"] != "modules":  # whatever of each is slow: batched, they are few
        facts = late[-1].facts | {"part_ms": of_loop * float(late_ms.mean())}
        return [*kept, CauseFinding("launch_bound", of_loop * late_ms, together(late), facts=facts)]
    if not behind_ms.mean() > max((finding.mean_ms for finding in own), default=0.0):
        return kept
    facts = {
        **late[-1].facts,
        "what": OWN,
        **(own[0].facts if own else {}),
        "behind": "the device idles for it behind the optimizer, with nothing queued",
        "part_ms": float(behind_ms.mean()),
    }
    return [
        *(finding for finding in kept if finding.kind != "program_code"),
        CauseFinding("program_code", behind_ms, together(late), facts=facts),
    ]


def _as_long_as_kernels(finding: CauseFinding, judged: Run, account: Account) -> None:
    """Where each launch waits for its kernel, host and device take turns: without that the shorter of the two
    goes, and the way there and back; at most what the device idles for."""
    busy_ms, idle_ms = account.mean_ms("compute", "hidden"), finding.mean_ms
    num_kernels = sum(
        judged.mean_of(of_operation(COUNT, name)) or 0.0 for name in operations(judged.metrics, COUNT)
    )
    least_ms = busy_ms + WAITED_MS * num_kernels
    if least_ms < idle_ms:
        finding.ms, finding.more_ms = finding.ms * (least_ms / idle_ms), idle_ms - least_ms
        finding.facts |= {"busy_ms": busy_ms, "origin": "blocking"}


def _beside_the_lock_ms(finding: CauseFinding, judged: Run, parts: Parts) -> float:
    """What may go with waits for the interpreter's lock, beyond what few samples allow for: other sleep, and
    what operators take longer beside a thread that computes on another core."""
    if parts.on_device:
        return 0.0
    row = slice(None) if finding.rank is None else judged.ranks.index(finding.rank)
    beside_ms = parts.ms_by_kind["asleep"][row].mean() + UNLIKE_CORES * parts.compute_ms[row].mean()
    return max(float(beside_ms) - math.expm1(finding.sample_error) * finding.mean_ms, 0.0)


def _tell_of_cupti(judged: Run, losses: list[CauseFinding]) -> None:
    """Of late launches, what may be only because kernels are timed is nothing that the program loses."""
    late = [finding for finding in losses if finding.kind == "launch_bound" and finding.mean_ms > 0]
    late_ms = sum(finding.mean_ms for finding in late)
    for finding in late:
        part = min(slower_launches(judged)[0] / late_ms, 1.0)
        finding.facts["least_part"] = (1 - part) * finding.facts.get("least_part", 1.0)
        finding.facts["cupti_ms"] = part * finding.mean_ms if part >= WORTH_SAYING else None


def _of_all_ranks(judged: Run, parts: Parts) -> Iterator[CauseFinding]:
    """What every rank spends: as much as the one that has least of it over the run. In a single step another
    one may have it: hosts of devices are not in step with each other."""
    is_crowded = "own_crowd" in program_of(judged.noted)[0]
    for name, kind in PART_KINDS:
        by_rank = parts.ms_by_kind.get(name)
        if by_rank is None:
            continue
        common = without_traces(of_the_least(by_rank))
        if not (common > 0).any():
            continue
        steps = steps_with(common)
        part_ms = float(common[steps].mean())
        told, part = _handed_over(judged, part_ms) if name == "data" else ({}, 1.0)
        if name == "pause":
            told, part = _quiet_calls(judged, steps)
        yield CauseFinding(
            kind,
            part * common,
            takes=_takes(name, parts),
            facts={
                "others_ms": part_ms,
                "step_ms": float(parts.step_ms[:, steps].mean()),
                "in_steps": int((common > 0).sum()),
                "num_steps": len(common),
                "waits": False,
                "host": IN_MODEL if parts.knows_host else NOT_RECORDED,
                **_words(name, parts, part_ms),
                **told,
                **(_asked_for(judged) if name == "garbage_collection" else {}),
                **(_looped(judged) if name == "launch" else {}),
                **({"at": crowded_at(judged.noted)} if name == "core_taken" else {}),
            },
            is_sure=name == "between_steps" and are_alike(common),
            # Threads that wait for one that has no core may spin meanwhile, which looks like work.
            more_ms=float(parts.work_ms.mean()) if name == "core_taken" and is_crowded else 0.0,
        )


def _collected_for_batches(judged: Run, losses: list[CauseFinding]) -> list[CauseFinding]:
    """Garbage is collected when enough objects are new: where nearly all of that comes while this process
    makes a batch, the batch's rows are these, and it goes with them."""
    data = next((one for one in losses if one.kind == "data_loading"), None)
    garbage = next((one for one in losses if one.kind == "garbage_collection"), None)
    if (
        data is None
        or garbage is None
        or "asked_at" in garbage.facts
        or "workers" in program_of(judged.noted)[0]
    ):
        return losses
    steps, within, whole = set(judged.global_step[judged.judged_steps].tolist()), 0.0, 0.0
    for record in (one for one in judged.records(judged.ranks[0]) if one.global_step in steps):
        spans = record.host_spans or []
        loads = [span for span in spans if span.kind == "data"]
        for span in (span for span in spans if span.kind == "garbage_collection"):
            length_ms = span.end_ms - span.start_ms
            whole += length_ms
            if any(one.start_ms <= span.start_ms and span.end_ms <= one.end_ms for one in loads):
                within += length_ms
    if within < NEARLY_ALL * whole:
        return losses
    both_ms = data.ms + garbage.ms
    part = garbage.mean_ms / float(both_ms.mean())
    data.facts["collecting_ms"] = garbage.mean_ms
    data.takes = {cells: (1 - part) * of for cells, of in data.takes.items()}
    data.takes |= {cells: part * of for cells, of in garbage.takes.items()}
    data.ms = both_ms
    return [one for one in losses if one is not garbage]


def _handed_over(judged: Run, part_ms: float) -> tuple[dict[str, object], float]:
    """What is said where, by samples, the thread that trains mostly takes batches out of workers' hands while
    it loads, for part_ms, and the part of that; few tensors take hardly any, as their memory is shared."""
    if "workers" not in program_of(judged.noted)[0] or part_ms < WHOLE_BATCH_MS:
        return {}, 1.0
    parts = []
    for one in samples_of_ranks(judged.whole):
        loads = one.is_judged & one.in_phase("data")
        receives, rebuilds = _in_functions(one, RECEIVES), _in_functions(one, REBUILDS)
        takes = loads & (rebuilds | (receives & one.that("runs")))
        parts.append(float(one.ms[takes].sum() / one.ms[loads].sum()) if takes.sum() >= FEWEST else 0.0)
    part = min(parts, default=0.0)
    return ({"origin": "pieces", "handed_ms": part * part_ms}, part) if part >= MOST_IN_PIECES else ({}, 1.0)


def _in_functions(one: Samples, names: re.Pattern[str]) -> Flags:
    """Whether a sample's innermost frame is such a function of Python's or torch's."""
    return one.leaf_in("python", "torch") & one.leaf_is(lambda leaf: bool(names.match(leaf.function)))


def _quiet_calls(judged: Run, steps: Flags) -> tuple[dict[str, object], float]:
    """What is said of a step that, between eval() and train(), calls the model for what it trains on; and the
    part that goes at most. With a cache each call has one position, and the first one all it is given.

    steps: that pause. Calls of a few of them are no part of the loop.
    """
    work = judged.noted.work
    quiet = None if work is None else work.quiet
    if quiet is None or steps.mean() < ALIKE_STEPS:
        return {}, 1.0
    first, last = quiet.columns
    told = {
        "what": f"{quiet.num} calls of the model a step without gradients",
        "num_calls": quiet.num,
        "calls_at": "" if quiet.at is None else f": at {quiet.at.text}",
        "is_most": True,
    }
    if first >= last:  # alike, or with a cache already
        return told, 1.0
    return told | {"columns": f"{first} to {last}"}, 1 - 2 * last / ((first + last) * quiet.num)


def _takes(name: str, parts: Parts) -> dict[tuple[str, ...], float]:
    """The cells of what all ranks spend on a part. Late launches and loading are in two rows: where a device
    waits for ranks meanwhile it does not idle."""
    in_waits = {"launch": parts.idle_waits_ms, "data": parts.data_waits_ms}
    cells = CELLS_OF_PART.get(name, (name, "wait") if name in in_waits else (name,))
    total = float(parts.ms_by_kind[name].mean())
    if name == "core_taken" and total > 0:  # of sleep no more than torch's threads lacked of cores
        ready = min(parts.account.mean_ms(name) / total, 1.0)
        return {(name,): ready, ("blocked",): 1 - ready}
    if name == "optimizer" and parts.on_device and total > 0:  # of idle time, and of its kernels
        idle = min(parts.account.mean_ms(name) / total, 1.0)
        return {(name,): idle, ("compute", "hidden"): 1 - idle}
    waits = float(in_waits[name].mean()) / total if name in in_waits and total > 0 else 0.0
    return {cells: 1 - waits, tuple(reversed(cells)): waits} if waits > 0 else {cells: 1.0}


def _with_common(losses: list[CauseFinding], common: list[CauseFinding]) -> list[CauseFinding]:
    """Where all ranks lose to one kind, and wait in turn for one that loses more, that is the same loss. So
    is what the program's own code does, as samples show, where the cells show the kind too."""
    merged: list[CauseFinding] = []
    for finding in common:
        of_kind = [
            other
            for other in losses
            if other.kind == finding.kind
            and other.facts.get("who") == IN_TURN
            and other.facts.get("op") == finding.facts.get("op")
        ]
        is_sampled = "group" in finding.facts or finding.kind in ("synchronisation", "copy")
        sampled = [
            other
            for other in merged
            if is_sampled and other.kind == finding.kind != "program_code" and "group" in other.facts
        ]
        for other in [*of_kind, *sampled]:
            finding.takes = together([finding, other])
            finding.ms = finding.ms + other.ms
            if "part_ms" in finding.facts and not (finding.kind == "copy" and "group" in other.facts):
                finding.facts["part_ms"] = float(finding.ms[steps_with(finding.ms)].mean())
            if other.facts.get("who") == IN_TURN and other.mean_ms >= WORTH_SAYING * finding.mean_ms:
                late = f"{quantity(other.mean_ms, 'ms')} of it are what {IN_TURN} need longer than the others"
                finding.evidence.append(f"{late}, which wait for them")
        if sampled:
            finding.facts["group"] = sampled[0].facts["group"]
        losses = [other for other in losses if other not in of_kind]
        merged = [*(other for other in merged if other not in sampled), finding]
    return [*losses, *merged]


def _whole_steps(losses: list[CauseFinding], step_ms: Floats, global_step: Ints) -> list[CauseFinding]:
    """Where a loss that the program was seen to make is most of what some steps take longer than the others,
    all of that is its: memory touched anew, ranks that wait for each other, code around the span. So is the
    finding of slow steps, where it is of the same ones."""
    kept = losses
    for finding in losses:
        if finding.kind not in SEEN or finding.occasions is not None:
            continue
        slow = _slow_steps_of(finding, global_step)
        if slow is None:
            continue
        excess = np.where(slow.is_slow, positive(step_ms - np.median(step_ms[~slow.is_slow])), 0.0)
        own = np.where(slow.is_slow, np.nan_to_num(finding.ms), 0.0)
        if not MOST_OF_STEPS * excess.sum() <= own.sum() < excess.sum():
            continue
        part = float(own.sum() / excess.sum())
        finding.takes = {cells: part * share for cells, share in finding.takes.items()}
        finding.takes[(*WAIT, "transfer", *ANY_CELL)] = 1 - part
        finding.ms = np.where(slow.is_slow, np.maximum(excess, own), finding.ms)
        finding.facts["beside_ms"] = float((excess - own)[slow.is_slow].mean())
        kept = [
            other
            for other in kept
            if other.facts.get("op") != "slow_steps"
            or other.occasions is None
            or not (other.occasions.is_slow & slow.is_slow).sum()
            >= ALIKE_STEPS * other.occasions.is_slow.sum()
        ]
    return kept


def _slow_steps_of(finding: CauseFinding, global_step: Ints) -> Occasions | None:
    """The steps that have the loss, where it is in a few that come with a period or stand apart."""
    if not np.median(np.nan_to_num(finding.ms)) < RARE * finding.mean_ms:
        return None
    return occasions(finding.ms, global_step, finding.slow_steps)


def _copied(judged: Run, ms: float) -> dict[str, object]:
    """What is copied from where, if most of a loss must be of such copies, whichever of them are hidden.
    ms: of the loss, in a step."""
    kinds = operations(judged.metrics, COPY_TIME)
    took = {kind: judged.mean_of(of_operation(COPY_TIME, kind)) or 0.0 for kind in kinds}
    most = max(took, key=lambda kind: took[kind], default="")
    if not most or ms - (sum(took.values()) - took[most]) < MOST_OF_COPIES * ms:
        return {}
    if 0 < took[most] < LEAST_OF_COPIES * ms:  # the rest are kernels that copy
        return {"origin": "device_to_device"}
    source, target = most.split("_to_")
    return {
        "origin": most,
        "copied_ms": took[most],
        "source": COPIED.get(source, source),
        "target": COPIED.get(target, target),
    }


def _saved_on_cpu(judged: Run) -> dict[str, object]:
    """Where samples show save_on_cpu() of torch: it copies what a backward pass needs to the CPU and back."""
    for one in samples_of_ranks(judged.whole)[:1]:
        is_there = one.is_judged & one.leaf_is(lambda leaf: leaf.function.startswith("save_on_cpu."))
        if is_there.sum() >= FEWEST:
            lines = Counter(innermost(stack.frames) for stack in one.chosen(is_there))
            return {"op": "saved", "at": lines.most_common(1)[0][0]}
    return {}


def _offloaded(judged: Run) -> dict[str, object]:
    """How long copies of what FSDP keeps on the CPU take, and what is free of the device's memory; nothing
    where it keeps nothing there, or the device has no room for it with some to spare."""
    used, kinds = memory_used(judged), operations(judged.metrics, COPY_TIME)
    if used is None or "offloaded" not in program_of(judged.noted)[0]:
        return {}
    free = used.limit_bytes - used.peak_bytes
    if 4 * bytes_of_optimizers(judged.noted) / len(judged.ranks) > free / 2:  # a gradient and two moments
        return {}
    copied_ms = sum(judged.mean_of(of_operation(COPY_TIME, kind)) or 0.0 for kind in kinds)
    return {"op": "offloaded", "copied_ms": copied_ms, "free_bytes": free}


def _asked_for(judged: Run) -> dict[str, object]:
    """Where the program itself collects garbage, if that is most of it."""
    lines = lines_of_spans(judged, "garbage_collection")
    line, (num, _) = max(lines.items(), key=lambda entry: entry[1], default=(("", 0), (0.0, 0.0)))
    is_most = line[1] > 0 and 2 * num > sum(each for each, _ in lines.values())
    return {"op": "asked_for", "asked_at": f"{line[0]}:{line[1]}"} if is_most else {}


def _looped(judged: Run) -> dict[str, object]:
    """The loop over operators that most of a step's launches are of; else calls of the model, if these are
    many."""
    work = judged.noted.work
    loop = None if work is None else loop_of(work)
    num = 0 if work is None else sum(line.operators for line in work.lines)
    if loop is None or loop.all_operators < MOST_OF_OPERATORS * num:
        calls = None if work is None else work.calls
        if calls is None or calls.num < MANY_CALLS:
            return {}
        told = {"origin": "calls", "num_calls": calls.num, "rows_each": counted(calls.rows, "row")}
        return told | {"calls_at": "" if calls.at is None else f": at {calls.at.text}"}
    return {
        "origin": loop.kind,
        "loop_at": loop.at,
        "loop_lines": lines_text(loop),
        "looped": f"{loop.all_operators:,}",
        "loop_part": loop.all_operators / num,
        "operators": f"{num:,}",
        "iterations": loop.iterations,
    }


def _words(name: str, parts: Parts, part_ms: float) -> dict[str, object]:
    """Facts that the texts of one part have; part_ms: what it takes in a step that has it."""
    if name == "asleep":
        return {"op": "asleep", "what": ASLEEP, "asleep_ms": part_ms}
    if name == "locked_out":
        return locked_out_facts(part_ms)
    facts: dict[str, object] = {"part_ms": part_ms}
    if name == "optimizer" and parts.is_unfused:
        return {"op": "unfused", "what": WORDS[name], "optimizer_ms": parts.account.mean_ms("optimizer")}
    if name == "optimizer" and parts.on_device and part_ms > 2 * (idle_ms := parts.account.mean_ms(name)):
        return facts | {"what": "optimizer that is not fused", "kernels_ms": part_ms - idle_ms}
    if name in WORDS:
        facts["what"] = WORDS[name]
    if name == "launch":
        is_waiting = float(parts.idle_waits_ms.mean()) >= WORTH_SAYING * part_ms
        facts["state"] = IDLES_OR_WAITS if is_waiting else "idles"
    if name == "launch" and parts.taken_ms is not None:
        taken_ms = float(parts.taken_ms.mean())
        if taken_ms >= WORTH_SAYING * part_ms:
            facts["taken_ms"] = taken_ms
    return facts


def _one_of_small_units(
    judged: Run, losses: list[CauseFinding], details: Exposure | None
) -> list[CauseFinding]:
    """Their collectives, and what they cost the host: one remedy."""
    small = [finding for finding in losses if finding.kind == "small_units"]
    units = None if details is None else details.units
    if not small or units is None:
        return losses
    ms = np.sum([finding.ms for finding in small], axis=0)
    host_ms = sum(finding.mean_ms for finding in small if "host_ms" in finding.facts)
    facts = {
        "things": "units",
        "wrapper": "FSDP",
        "count": float(units.num),
        "bytes": units.bytes,
        "merged": float(units.num_merged),
        "names": units.name or None,
        "op": "blocks" if not units.level and "blocks" in program_of(judged.noted)[0] else None,
        "origin": "level" if units.level else None,
        "level": units.level,
        "per_unit_ms": float(ms.mean()) / (units.num - units.num_merged),
        "needless": units.num - units.num_merged,
        "host_ms": host_ms or None,
    }
    if not units.name:
        facts |= {"origin": "bucket", "things": "buckets", "buckets": str(units.num), "wrapper": DDP}
    merged = CauseFinding("small_units", ms, together(small), facts=facts)
    return [merged, *(finding for finding in losses if finding not in small)]


def _leave_to_rows(losses: list[CauseFinding]) -> None:
    """An optimizer that goes through rows of tables that are not looked up goes through fewer, or is fused:
    of both the larger is told."""
    rows = next((one for one in losses if one.facts.get("rows_part")), None)
    for finding in losses:
        if rows is not None and finding.kind == "optimizer" and rows.mean_ms >= finding.mean_ms:
            finding.shorten(1 - rows.facts["rows_part"])


def _one_of_small_messages(
    judged: Run, account: Account, losses: list[CauseFinding], details: Exposure | None
) -> list[CauseFinding]:
    """Of the operation with most of them, their time on the device, what launching them costs the host, and
    who waits for that: one remedy. Those of other operations stay apart."""
    known = small_calls(judged, details)
    op = known[0]["op"] if known else None
    small = [
        finding
        for finding in losses
        if finding.kind == "small_messages" and finding.facts.get("op", op) in (op, None)
    ]
    if not small:
        return losses
    facts = known[0] if known else {}
    for finding in small:
        facts |= finding.facts if "per_call_ms" in finding.facts else {}
    host_ms = [finding.mean_ms for finding in small if "per_call_ms" not in finding.facts]
    if host_ms:
        facts["host_ms"] = float(sum(host_ms))
    merged = CauseFinding(
        "small_messages", np.sum([finding.ms for finding in small], axis=0), together(small), facts=facts
    )
    if account.on_device:
        _as_long_as_seen(merged, judged, account)
    if "count" in facts:
        facts["per_call_ms"] = merged.mean_ms / float(facts["count"])  # type: ignore[arg-type]
    return [merged, *(finding for finding in losses if finding not in small)]


def _as_long_as_seen(finding: CauseFinding, judged: Run, account: Account) -> None:
    """Messages of the program, as long as the thread that trains was seen to call for them, where that bounds
    the step: what one launch costs at least leaves out what a barrier waits for. Elsewhere no more goes."""
    samples = samples_of_ranks(judged.whole)
    ms = [of_one for one in samples for of_one in one.ms[one.is_judged & one.in_phase("communication")]]
    seen_ms, told_ms = float(sum(ms)) / max(len(samples), 1), finding.mean_ms
    if len(ms) < FEWEST:
        return
    if account.share("launch") < MOSTLY_IDLE or seen_ms <= told_ms:
        most_ms = seen_ms * math.exp(OF_SAMPLES / math.sqrt(len(ms)))
        finding.facts["rest_ms"] = max(most_ms - told_ms, 0.0)
        return
    finding.takes = {cells: part * told_ms / seen_ms for cells, part in finding.takes.items()}
    finding.takes["launch", "wait", "blocked"] = 1 - told_ms / seen_ms
    finding.ms, finding.num_samples = finding.ms * (seen_ms / told_ms), len(ms)
    finding.facts |= {
        "seen_ms": seen_ms,
        "seen_in": counted(len(ms), "sample"),
        "host_ms": None,
        "rest_ms": 0.0,
    }


def _one_of_a_program(judged: Run, losses: list[CauseFinding]) -> list[CauseFinding]:
    """Small and large calls of one operation that the program itself issues are one loss, of the kind that
    has more: it can leave them out, or join them. What is exposed of other operations is none of it."""
    of_program = [
        finding
        for finding in losses
        if finding.kind in ("small_messages", "transfer")
        and finding.facts.get("origin") in ("program", "own", "results", "gradients", "weights", "one_rank")
    ]
    if len({finding.facts["op"] for finding in of_program}) != 1 or len(of_program) < 2:
        return losses
    merged = max(of_program, key=lambda finding: finding.mean_ms)
    merged.takes = together(of_program)
    exposed = positive(judged.values(f"exposed_ms.{merged.facts['op']}")).mean(axis=0)
    total = np.sum([finding.ms for finding in of_program], axis=0)
    merged.ms = np.maximum(np.minimum(total, exposed), merged.ms)  # which has what the host takes, too
    return [finding for finding in losses if finding is merged or finding not in of_program]


def _one_of_a_line(judged: Run, losses: list[CauseFinding]) -> list[CauseFinding]:
    """A line that copies and waits for the copy is one loss, of the kind that has more of it."""
    kinds = ("synchronisation", "copy")
    found = [finding for finding in losses if finding.kind in kinds and finding.rank is None]
    lines = {(line.file, line.line) if (line := line_of(one, judged)) else None for one in found}
    if sorted(finding.kind for finding in found) != sorted(kinds) or len(lines) != 1 or None in lines:
        return losses
    merged, other = sorted(found, key=lambda finding: -finding.mean_ms)
    what = "copies" if other.kind == "copy" else "what the device idles after the host waited for them"
    merged.evidence.append(f"with {quantity(other.mean_ms, 'ms')} that are {what}, of the same line")
    merged.takes, merged.ms = together(found), merged.ms + other.ms
    return [finding for finding in losses if finding is not other]


def _leave_to(steps: Flags, losses: list[CauseFinding]) -> None:
    """In steps that are longer for a reason of their own, the other findings have what they usually have."""
    if (~steps).sum() < MIN_OTHER_STEPS:
        return
    for finding in losses:
        usual = float(np.nanmean(finding.ms[~steps]))
        finding.ms = np.where(steps, np.minimum(finding.ms, usual), finding.ms)
