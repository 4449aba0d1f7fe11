"""Why communication is exposed after the last rank came: small calls, gathers without prefetch, a busy
communicator; what remains is the transfer itself, of the operation that is exposed longest.

Which collectives stick out is read from a few steps whose details were kept.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile

import numpy as np

from aorta.account.cause import MENDED_ERROR
from aorta.account.judge.cells import Exposed, Host
from aorta.account.judge.sites import gathers_parameters, sites_of
from aorta.account.judge.stacks import FEWEST, samples_of_ranks, timed_samples_of
from aorta.account.load.measures import noted_program, num_threads
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import byte_text, counted
from aorta.account.rows import positive
from aorta.records.schema import CollectiveRecord, StepRecord
from aorta.timeline.arrays import Floats
from aorta.timeline.collective import POINT_TO_POINT, busbw_factor
from aorta.timeline.intervals import Intervals, intersect, length_ms, subtract, union
from aorta.timeline.matching import UNKNOWN_OP
from aorta.timeline.types import TRACE_SOURCES
from aorta.why.causes.code_lines import beside_calls_ms, is_behind_backward
from aorta.why.causes.finding import OF_SAMPLES, WAIT, CauseFinding
from aorta.why.causes.losses.host_needs import MOSTLY_IDLE
from aorta.why.causes.losses.parts import CPU_BYTES_PER_S, Parts, part_of_device
from aorta.why.causes.losses.program_code import DETAILED_STEPS
from aorta.why.causes.losses.seen import Seen
from aorta.why.causes.losses.units import (
    BUCKET_ERROR,
    BUCKET_KERNELS,
    UNIT_OPS,
    Units,
    buckets_of,
    launch_ms_of_unit,
    one_unit_text,
    units_of,
)
from aorta.why.causes.program import (
    FLOATS,
    bytes_of_optimizers,
    is_one_unit,
    num_parameters,
    num_units,
    parameter_dtype,
    program_of,
)

MOVING: dict[tuple[str, ...], float] = {("transfer", "communication"): 1.0}
BESIDE = ("compute", "hidden", "core_taken", "blocked")
"""Where copies beside a transfer are on a CPU."""
SENDS_BUFFERS = "_distributed_broadcast_coalesced"
SMALL_BYTES = 1 << 20
"""A call below it may be bound by latency."""
OF_ZERO = "optimizer: ZeroRedundancyOptimizer"
"""What broadcasts are named for that send updated parameters to the ranks that did not update them."""
BARRIER = "barrier"
"""The one operation that moves no bytes."""
LOOKED_AT = 24
"""Lines whose calls are looked at."""
MANY_CALLS = 8
"""Small calls of an operation in a step, from which on merging them is worth a thought."""
TO_ONE = ("gather", "reduce")
"""Operations that send to one rank."""
ABOUT = 0.1
"""Part by which two numbers of tensors may differ that are the same ones."""
SHORT_PERCENTILE = 25
"""Of the times between two launches of small calls."""
SLOWEST_LINK_GB_S = 0.5
"""busbw that any network of a training job reaches; where the run itself reaches more, that counts."""
MERGED_BYTES = 25 << 20
"""As DDP's buckets."""
HIDDEN_ENOUGH = 0.6
"""Hidden part of gathers, from which on they are prefetched: of few, the first one cannot be hidden."""
MIN_GATHERS = 3
EVENT_MS = 0.02
"""From an event of one stream to the kernel of another that waits for it takes less."""
NEEDLESS = {
    **dict.fromkeys(("nothing", "a tensor", "a few numbers", "a value", "a metric"), "own"),
    **{"an object": "object", "buffers": "buffers", f"for {OF_ZERO}": "zero"},
}
"""What moves that is no gradient or parameter, as call sites have it, and its origin for the rules; and what
one optimizer in place of another does not send."""
GATHERS = ("all_gather", "gather")
"""What moves results of all ranks to some."""
MOST_OF_ALL = 0.9
"""Part of exposed time above which an operation is named without the others."""
UNHIDDEN = 0.05
"""Hidden part of an operation, below which nothing hides it."""
MOST_OF_THEM = 1.5
"""Small calls of an operation over its buckets, below which they are mostly these."""
PASSES_OF_BUCKETS = 4
"""Gradients are read and written on their way into a bucket, and on their way back."""
OF_COPY = 0.6
"""Of what launching a kernel of an operator costs the host, a copy of a gradient into its bucket or back: 0.4
and 0.9 of it on two hosts of H200, whose steps got 18 and 43 ms shorter without 2,016 of them."""
WORTH_SAYING = 0.1
"""Of a loss, from which on a sentence says what a part of it is."""
QUEUED_RATIO = 4
"""Bytes of the call in front over those of the call that waits behind it."""


@dataclass(slots=True)
class Exposure:
    """Means over the detailed steps of the ranks that were read, per step."""

    by_call: dict[tuple[str, str, str], tuple[float, int, int]]
    """(op, module or '', group) -> exposed ms, bytes of the largest call, calls."""
    num_small: dict[tuple[str, str, str], int]
    """The same -> calls of at most SMALL_BYTES."""
    queued_ms: float
    """Exposed while a call waited behind a larger one of its communicator."""
    queued_what: str
    held_back: tuple[float, float]
    """Gathers that are launched ahead and start in the midst of compute, and what all of them start late."""
    small_launch_ms: float
    """Of the host, to launch the small calls of a step."""
    example: tuple[int, int, float, float] | None
    """Rank, global step, start and end of the longest exposed stretch."""
    num_updates: int
    """How often an optimizer steps behind a backward pass, in the median step; at least 1."""
    wide: dict[str, "Wide"]
    """By operation, its large calls of a wider dtype than the parameters have."""
    units: Units | None
    """Of FSDP, or DDP's buckets, where there are too many."""
    unit_launch_ms: float
    """Of the host, for each unit of a step."""


@dataclass(slots=True)
class Wide:
    """A call ends earlier by its bytes' part of its time, of which no more can be saved than sticks out."""

    parameter_dtype: str
    dtype: str
    part: float
    """Of the operation's exposed ms, what its calls would end earlier."""
    bytes: float
    """Of the calls in a step, as they are."""


def transfer(judged: Run, parts: Parts, exposed: Exposed, details: Exposure | None) -> Iterator[CauseFinding]:
    left = exposed.lost_moving_ms
    if not left.any():
        return
    small = [*_small_units(judged, left, details), *_small_messages(judged, left, details)]
    # What merging small calls of an operation saves cannot be hidden or waited for a second time.
    taken = {str(finding.facts["op"]): finding.ms for finding in small}
    for finding in (
        *small,
        _shared_communicator(details, left),
        _no_prefetch(judged, parts, left, taken, details),
        _bubble(judged, parts, left, taken),
    ):
        if finding is not None:
            finding.ms = np.minimum(finding.ms, left)
            left = left - finding.ms
            yield finding
            if finding.kind == "no_prefetch":
                taken["all_gather"] = taken.get("all_gather", 0.0) + finding.ms
    shares = _shares_of_transfer(judged, taken)
    transfer_ms = positive((exposed.transfer_ms + exposed.unsplit_ms).mean(axis=0) - sum(taken.values()))
    delaying_ms, in_turn = np.minimum(transfer_ms, left), _in_turn(exposed)
    repeats_of = _repeats(details)
    for op, repeats in repeats_of.items():
        if op in shares:
            finding = _repeated(shares[op] * delaying_ms, shares[op] * in_turn, repeats)
            finding.facts |= {**_facts_of(judged, parts, exposed, details, op), **finding.facts}
            bound = float(judged.source == "host")
            if parts.on_device:
                bound = 1 - _add_launches(finding, judged, parts, exposed, details, repeats)
                beyond_ms = (1 - 1 / repeats) * shares[op] * float((transfer_ms - delaying_ms).mean())
                is_large = beyond_ms > WORTH_SAYING * finding.mean_ms
                finding.facts["unqueued_ms"] = beyond_ms if is_large else None
                # A host that nothing holds up by recording may be ahead where it was late.
                slowed_ms = max(parts.account.recorded_ms - parts.account.mean_step_ms, 0.0)
                finding.more_ms = min(beyond_ms, slowed_ms)
                if finding.more_ms > WORTH_SAYING * finding.mean_ms:
                    finding.facts["slowed_ms"] = slowed_ms
            left = left * (1 - shares[op] * (1 - 1 / repeats))
            is_one_update = details is not None and details.num_updates == 1
            finding.facts |= {
                "what": f"gradients, reduced {repeats} times for one update ({op})",
                "pass_ms": parts.account.mean_step_ms / repeats if is_one_update else None,
            }
            _take_what_hides(finding, judged, op, repeats, bound)
            yield finding
    for op, wide in (details.wide if details else {}).items():
        if op not in shares:
            continue
        ms = np.minimum(wide.part * shares[op] * transfer_ms / repeats_of.get(op, 1), left)
        beyond = 1 - FLOATS[wide.parameter_dtype] / FLOATS[wide.dtype]
        shares[op] *= 1 - wide.part
        left = left - ms
        facts = _facts_of(judged, parts, exposed, details, op) | {
            "dtype": wide.dtype,
            "parameter_dtype": wide.parameter_dtype,
            "times": f"{FLOATS[wide.dtype] // FLOATS[wide.parameter_dtype]}",
            "total_bytes": wide.bytes,
        }
        finding = CauseFinding("wide_dtype", ms, MOVING, facts=facts)
        if beside_ms := beside_calls_ms(finding, judged):
            finding.facts["beside_ms"] = beside_ms
            finding.ms = ms + beside_ms
            moved = float(ms.mean()) / finding.mean_ms
            finding.takes = {**{cells: moved for cells in MOVING}, ("compute", "hidden"): 1 - moved}
        if judged.source == "host":  # what is hidden takes cores as well
            all_ms, bare_ms = (judged.mean_of(of_operation(name, op)) for name in ("comm_ms", "exposed_ms"))
            finding.more_ms = max((all_ms or 0.0) - (bare_ms or 0.0), 0.0) * beyond
        yield finding
    # What a program need not send is a cause of its own; gradients and parameters have one remedy.
    needless = [op for op in shares if moves_of(judged, op) in NEEDLESS]
    # Gradients that the program reduces itself look like any tensor; what it broadcasts is there already.
    for op in sorted(needless, key=lambda op: op == "all_reduce"):
        ms = np.minimum(shares.pop(op) * transfer_ms, left)
        left = left - ms
        finding = CauseFinding("transfer", ms, MOVING, facts=_facts_of(judged, parts, exposed, details, op))
        if finding.facts["moves"] == "buffers" and judged.source == "host":
            _add_copies_of_buffers(finding, judged, parts)
        yield finding
    if shares:
        yield CauseFinding(
            "transfer", left, MOVING, facts=_facts_of(judged, parts, exposed, details, *shares)
        )


def _add_copies_of_buffers(finding: CauseFinding, judged: Run, parts: Parts) -> None:
    """What samples show beyond it of DDP's function that broadcasts buffers on a CPU: it copies them into one
    tensor and back, and gloo's threads have the cores meanwhile."""
    samples = samples_of_ranks(judged.whole, timed_samples_of)
    seen = Seen.where(samples, lambda one: one.that_call(SENDS_BUFFERS))
    if not samples or seen.fewest < FEWEST:
        return
    ms, num = seen.common_ms(judged.whole, parts.account)
    exposed_ms = judged.mean_of(of_operation("exposed_ms", str(finding.facts["op"]))) or 0.0
    exposed_ms *= parts.account.mean_step_ms / parts.account.recorded_ms
    # Ranks wait for each other at the next collective then.
    own_ms = float(ms.mean()) - max(exposed_ms - finding.mean_ms, 0.0)
    if own_ms > finding.mean_ms > 0:
        moved = finding.mean_ms / own_ms
        finding.ms = ms * (own_ms / float(ms.mean()))
        finding.size_error = (1 - moved) * OF_SAMPLES / math.sqrt(num)  # of what samples add
        finding.takes = {**{cells: moved for cells in MOVING}, BESIDE: 1 - moved}
        finding.facts["in_call_ms"] = own_ms


def _facts_of(
    judged: Run, parts: Parts, exposed: Exposed, details: Exposure | None, *ops: str
) -> dict[str, object]:
    """Of the operation of these that is exposed longest."""
    facts = _largest(judged, details, ops)
    op = str(facts["op"])
    rates = [row.busbw_gb_s for row in judged.collective_rows if row.op == op and row.busbw_gb_s]
    if rates and (moved_bytes := judged.mean_of(of_operation("bytes", op))):
        facts |= {"rate": max(rates), "moved_bytes": moved_bytes}
    facts |= {
        "kind_of_loss": "transfer" if exposed.is_split else "communication",
        "moves": moves_of(judged, op),
    }
    if not exposed.is_split:
        facts["unsplit"] = "this includes waiting for late ranks: the ranks could not be matched"
    if facts["moves"] in NEEDLESS and facts.get("origin") not in (
        *("bucket", "unit", "gradients", "weights", "one_rank"),
    ):
        facts["origin"] = "results" if _are_results(judged, op) else NEEDLESS[str(facts["moves"])]
    facts["is_proven"] = parts.on_device and _is_unhidden(judged, parts, op)
    return facts


def _shares_of_transfer(judged: Run, taken: dict[str, Floats]) -> dict[str, float]:
    """Of what is left of the transfer, each operation's, by how long it is exposed beyond what was taken; all
    of it of none, '', where no operation is known."""
    bare = {
        op: (judged.mean_of(of_operation("exposed_ms", op)) or 0.0) - float(np.mean(taken.get(op, 0.0)))
        for op in operations(judged.metrics, "exposed_ms")
    }
    total = sum(max(ms, 0.0) for ms in bare.values())
    return {op: ms / total for op, ms in bare.items() if ms > 0} or {"": 1.0}


def moves_of(judged: Run, op: str) -> str:
    """What most bytes of an operation, of one without any most calls, are: 'an object', 'buffers'; '' where
    nobody looked."""
    rows = [row for row in sites_of(judged) if row.op == op]
    has_bytes = any(row.bytes_per_step for row in rows)
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        weights[row.kind] += row.bytes_per_step if has_bytes else row.per_step
    most = max(weights, key=lambda moves: weights[moves], default="")
    return most if weights and weights[most] > 0.5 * sum(weights.values()) else ""


def _is_unhidden(judged: Run, parts: Parts, op: str) -> bool:
    """Nothing hides what an operation takes, or any: that is certain, however little it is."""
    comm, bare = (judged.mean_of(of_operation(name, op)) for name in ("comm_ms", "exposed_ms"))
    is_bare = comm is not None and bare is not None and bare >= (1 - UNHIDDEN) * comm > 0
    return is_bare or parts.account.mean_ms("hidden") < UNHIDDEN * parts.account.comm_ms


def _repeats(details: Exposure | None) -> dict[str, int]:
    """How often an operation reduces the gradients of the same bucket or unit between two optimizer steps,
    where that is more than once."""
    calls = [
        (op, module, num) for (op, module, _), (_, _, num) in (details.by_call if details else {}).items()
    ]
    units = {module for op, module, _ in calls if op == "reduce_scatter"}
    of_op: dict[str, list[int]] = defaultdict(list)
    for op, module, num in calls:
        if op in ("all_reduce", "reduce_scatter") and module and (_is_bucket(module) or module in units):
            of_op[op].append(num)
    # Two models that are trained in turn have an optimizer's step behind each of their reductions.
    num_updates = details.num_updates if details else 1
    repeats = {op: int(np.median(nums)) // num_updates for op, nums in of_op.items()}
    return {op: num for op, num in repeats.items() if num > 1}


def _repeated(transfer_ms: Floats, in_turn_ms: Floats, repeats: int) -> CauseFinding:
    """Reductions of the same gradients before the last one of a step: of their transfer what delays the step,
    and the waiting for ranks in turn. Of that more is left than of the transfer: what ranks vary by adds up
    over micro-batches as a sum of chances does."""
    transfer_ms, wait_ms = transfer_ms * (1 - 1 / repeats), in_turn_ms * (1 - 1 / np.sqrt(repeats))
    total = float((transfer_ms + wait_ms).mean())
    part = float(transfer_ms.mean()) / total if total > 0 else 1.0
    return CauseFinding(
        "transfer",
        transfer_ms + wait_ms,
        {("transfer", "communication"): part, WAIT: 1 - part},
        facts={"origin": "accumulated", "repeats": repeats, "is_proven": True},
    )


def _add_launches(
    finding: CauseFinding,
    judged: Run,
    parts: Parts,
    exposed: Exposed,
    details: Exposure | None,
    repeats: int,
) -> float:
    """What the host of a device needs to launch the needless ones, as far as that runs dry: what is exposed
    with nothing queued behind it, fewer launches shorten and no shorter transfer does. Who waits for a slower
    rank waits for it behind the last reduction as well. Returns the part of the step that the host bounds."""
    kernels, delaying_ms = Host(judged, judged.judged_steps).num_kernels, finding.ms
    calls = [
        (module, count)
        for (op, module, _), (_, _, count) in (details.by_call if details else {}).items()
        if op == finding.facts["op"] and module
    ]
    num, launch = sum(count for _, count in calls), parts.account.cells.get("launch")
    if kernels is None or not kernels.mean() > 0 or launch is None:
        return 1.0
    is_copied = finding.facts["op"] == "all_reduce" and "bucket_view" not in program_of(judged.noted)[0]
    copies = is_copied * 2 * sum(_num_gradients(module) * count for module, count in calls)
    of_bucket = BUCKET_KERNELS / 2
    all_kernels = float(kernels.mean()) + num * (of_bucket - 1) - copies * (1 - OF_COPY)
    part = (1 - 1 / repeats) * (num * of_bucket + copies * OF_COPY) / all_kernels
    moving_ms = (exposed.transfer_ms + exposed.unsplit_ms).mean(axis=0)
    unqueued_ms = positive(moving_ms - exposed.lost_moving_ms)
    late_ms = (launch + exposed.idle_waits_ms).mean(axis=0) + unqueued_ms
    # A host that the device waits for so long is held up by nothing: all of its time is the step's.
    bound_ms = np.minimum(parts.account.step_ms.mean(axis=0), late_ms / MOSTLY_IDLE)
    finding.ms = delaying_ms + min(part, 1.0) * bound_ms
    bound = float(bound_ms.mean()) / parts.account.mean_step_ms
    if finding.mean_ms > 0:
        of_host = 1 - float(delaying_ms.mean()) / finding.mean_ms
        finding.takes = {cells: share * (1 - of_host) for cells, share in finding.takes.items()}
        finding.takes["launch", "wait"] = of_host
        finding.size_error = BUCKET_ERROR * of_host
        finding.facts |= {
            "launches": f"{num * (1 - 1 / repeats):,.0f}",
            "launches_ms": of_host * finding.mean_ms if of_host > WORTH_SAYING else None,
            "rest_ms": float(_in_turn(exposed).mean()) / math.sqrt(repeats),
        }
    return bound


def _num_gradients(bucket: str) -> int:
    """'bucket 1: layers.9.weight and 3 more' has four."""
    more = re.search(r" and (\d+) more$", bucket)
    return 1 + int(more[1]) if more else 1


def _take_what_hides(finding: CauseFinding, judged: Run, op: str, repeats: int, bound: float) -> None:
    """What is hidden takes cores and bandwidth of the backward pass, and copies into buckets and back are
    part of that: between nothing and all of either goes as well, as far as that bounds a step. Half is told.
    Hardly all of both goes at once; where neither costs anything, what is exposed is left."""
    all_ms, bare_ms = (judged.mean_of(of_operation(name, op)) or 0.0 for name in ("comm_ms", "exposed_ms"))
    needless, sure_ms = bound * (1 - 1 / repeats), finding.mean_ms
    hidden_ms, copied_ms = max(all_ms - bare_ms, 0.0) * needless, 0.0
    if not sure_ms > 0 or not hidden_ms > 0:
        return
    if "bucket_view" not in program_of(judged.noted)[0] and op == "all_reduce":
        moved_bytes = needless * (judged.mean_of(of_operation("bytes", op)) or 0.0)
        rate = num_threads(judged.noted) * CPU_BYTES_PER_S
        if judged.source != "host":
            hardware = part_of_device(judged)
            rate = math.inf if hardware is None else hardware.memory.sustained_hbm_bytes_per_s
        copied_ms = PASSES_OF_BUCKETS * moved_bytes / rate * 1e3
    told_ms = sure_ms + (hidden_ms + copied_ms) / 2
    sure = sure_ms / told_ms
    finding.ms = finding.ms / sure
    finding.takes = {cells: part * sure for cells, part in finding.takes.items()}
    finding.takes["hidden", "compute"] = 1 - sure
    finding.size_error = math.hypot(finding.size_error * sure, math.hypot(hidden_ms, copied_ms) / 2 / told_ms)
    least_ms = told_ms * math.exp(-math.hypot(MENDED_ERROR, finding.size_error))
    if hidden_ms > WORTH_SAYING * told_ms:
        finding.facts |= {"hidden_ms": hidden_ms, "copied_ms": copied_ms or None}
    finding.facts["least_part"] = min(sure_ms / least_ms, 1.0)


def _in_turn(exposed: Exposed) -> Floats:
    """[step]: waiting of the mean rank that delays it, as far as the ranks wait for each other alike."""
    by_rank = exposed.caused_ms.sum(axis=1)
    even = float(by_rank.min() * len(by_rank) / by_rank.sum()) if by_rank.sum() > 0 else 0.0
    result: Floats = even * exposed.lost_ms.mean(axis=0)
    return result


def small_calls(judged: Run, details: Exposure | None) -> list[dict[str, object]]:
    """Operations with many small calls in a step, that with most first, and what is known of them. Those of
    too many units are no messages that could be joined otherwise, and those between stages of a pipeline
    take as long as one waits for the other."""
    units = None if details is None else details.units
    best = best_busbw(judged)
    calls_of_op: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind in judged.collectives:
        count = float(np.median(positive(kind.count))) if kind.count.size else 0.0
        if count and (kind.num_ranks or 0) > 1 and kind.op not in POINT_TO_POINT:
            calls_of_op[kind.op].append(
                (count, kind.bytes if kind.bytes is not None else _mean_bytes(judged, kind.op))
            )
    found: list[tuple[float, dict[str, object]]] = []
    for op, kinds in calls_of_op.items():
        small = [
            (count, size) for count, size in kinds if (size > 0 or op == BARRIER) and size <= SMALL_BYTES
        ]
        count = sum(call[0] for call in small)
        if units is not None and op in units.ops and (op in UNIT_OPS or count < MOST_OF_THEM * units.num):
            continue
        if count < max(MANY_CALLS, 0.5 * sum(call[0] for call in kinds)):
            continue
        num_bytes = sum(number * size for number, size in small)
        ideal_ms = num_bytes * busbw_factor(op, _num_ranks(judged, op)) / best / 1e6
        facts: dict[str, object] = {
            "op": op,
            "count": count,
            "bytes": num_bytes / count,
            "total_bytes": num_bytes or None,  # barriers have none
            "ideal_ms": ideal_ms / count or None,
            "merged": max(1.0, np.ceil(num_bytes / MERGED_BYTES)),
            "best": best,
        }
        found.append((count, facts))
    return [facts for _, facts in sorted(found, key=lambda entry: -entry[0])]


def _mean_bytes(judged: Run, op: str) -> float:
    """Of a call, where an operation has too many sizes to tell them apart."""
    size, count = (positive(judged.metrics[f"{name}.{op}"]) for name in ("bytes", "count"))
    return float(np.median(size) / max(np.median(count), 1.0))


def _small_messages(run: Run, exposed: Floats, details: Exposure | None) -> Iterator[CauseFinding]:
    """Calls that take much longer than their bytes would: merged, they would pay the latency once. One
    finding for each operation that has many."""
    for facts in small_calls(run, details):
        op = str(facts["op"])
        latency_ms = _latency_ms(run, op, exposed)
        if latency_ms is None:
            continue
        merged = float(facts["merged"]) / float(facts["count"])  # type: ignore[arg-type]
        saved = latency_ms * (1 - merged)
        per_call = float(saved.mean()) / float(facts["count"])  # type: ignore[arg-type]
        origin = _origin(run, details, op, of_small=True)
        facts |= {"per_call_ms": per_call, "origin": origin}
        if origin in ("program", "weights"):
            facts |= _own_calls(run, op)
            if _are_asynchronous(run, op):
                facts |= {"waits": False, "moves": "asynchronous calls"}
        yield CauseFinding("small_messages", saved, MOVING, facts=facts)


def _small_units(run: Run, exposed: Floats, details: Exposure | None) -> Iterator[CauseFinding]:
    """The latency of the gathers and of the reductions of units that larger ones would not have."""
    units = None if details is None else details.units
    for op in () if units is None else units.ops:
        latency_ms = _latency_ms(run, op, exposed)
        if units is not None and latency_ms is not None:
            yield CauseFinding("small_units", latency_ms * units.part, MOVING, facts={"op": op})


def _latency_ms(run: Run, op: str, exposed: Floats) -> Floats | None:
    """[step]: what is exposed of an operation beyond what its bytes take."""
    names = [f"{name}.{op}" for name in ("comm_ms", "exposed_ms", "bytes")]
    if not set(names) <= run.metrics.keys():
        return None
    comm, bare, size = (positive(run.values(name)).mean(axis=0) for name in names)
    # The large calls of the operation have their time.
    ideal_ms = size * busbw_factor(op, _num_ranks(run, op)) / best_busbw(run) / 1e6
    latency: Floats = np.minimum(bare, exposed) * np.clip(1 - ideal_ms / np.maximum(comm, 1e-9), 0.0, 1.0)
    return latency


def _are_asynchronous(judged: Run, op: str) -> bool:
    """Whether most calls of it are, as far as lines have kept calls: the program goes on meanwhile."""
    lines = islice(judged.records(judged.ranks[0]), LOOKED_AT)
    calls = [call.is_async for line in lines for call in line.collectives or () if call.op == op]
    return 2 * sum(calls) > len(calls)


def _are_results(judged: Run, op: str) -> bool:
    """Whether most bytes of an operation are large gathers behind the optimizer's update that are not all
    weights: what the model has given for what this update has learned from."""
    if op not in GATHERS:
        return False
    lines = [line for line in islice(judged.records(judged.ranks[0]), LOOKED_AT) if line.collectives]
    # Where a step begins behind an update, the source tells these from gathers that a loss is made of.
    behind: dict[str | None, float] = {"forward": 0.0 if is_behind_backward(judged, op) else np.inf}
    all_bytes = behind_bytes = 0
    for line in lines:
        updates = [span.end_ms for span in line.host_spans or () if span.kind == "optimizer"]
        behind["optimizer"] = max(updates, default=np.inf)
        for call in line.collectives or ():
            if call.op == op and call.bytes:
                at_ms = (call.start_ms if call.launch_ms is None else call.launch_ms) or 0.0
                is_behind = call.bytes >= SMALL_BYTES and at_ms >= behind.get(call.phase, np.inf)
                all_bytes, behind_bytes = all_bytes + call.bytes, behind_bytes + is_behind * call.bytes
    weights = bytes_of_optimizers(judged.noted)
    is_of_weights = abs(all_bytes / max(len(lines), 1) - weights) <= ABOUT * weights
    return not is_of_weights and 2 * behind_bytes > all_bytes


def _own_calls(judged: Run, op: str) -> dict[str, object]:
    """Number and size of the small calls that no library issues, where someone looked: the mean of all small
    ones has the last buckets of gradients in it."""
    own = [row for row in sites_of(judged) if row.op == op and not row.is_bucket]
    own = [row for row in own if row.bytes_per_step <= row.per_step * SMALL_BYTES]
    count, size = sum(row.per_step for row in own), sum(row.bytes_per_step for row in own)
    return {"count": count, "bytes": size / count, "total_bytes": size or None} if count >= MANY_CALLS else {}


def _is_every_gradient(judged: Run) -> bool:
    """The program itself reduces about as many tensors in a step as its optimizer updates, no values."""
    num, calls = num_parameters(judged.noted), judged.mean_of("count.all_reduce") or 0.0
    own = [row for row in sites_of(judged) if row.op == "all_reduce" and not row.is_bucket]
    is_whole = not own or 2 * sum(row.bytes_per_step for row in own) >= bytes_of_optimizers(judged.noted)
    return is_whole and num >= MANY_CALLS and abs(calls - num) <= ABOUT * num


def _are_all_weights(judged: Run) -> bool:
    """The program broadcasts as many bytes in a step as its optimizer updates: a rank with a part of the
    optimizer's state, which others need the weights of, updates fewer."""
    size = sum(row.bytes_per_step for row in sites_of(judged) if row.op == "broadcast")
    all_bytes = bytes_of_optimizers(judged.noted)
    return all_bytes > 0 and abs(size - all_bytes) <= ABOUT * all_bytes


def _come_by_one_rank(judged: Run) -> bool:
    """As much goes to one rank in a step as is broadcast: gradients, and these again or weights."""
    to_one, back = (
        sum(row.bytes_per_step for row in sites_of(judged) if row.op in ops)
        for ops in (TO_ONE, ("broadcast",))
    )
    return to_one >= (1 - ABOUT) * back


def _bubble(run: Run, parts: Parts, exposed: Floats, taken: dict[str, Floats]) -> CauseFinding | None:
    """Sends and receives that take longer than their bytes would: they wait for a neighbour in a pipeline."""
    best = best_busbw(run)
    waited = np.zeros_like(exposed)
    facts: dict[str, object] = {"best": best}
    if parts.on_device and parts.cpu_ms is not None:
        facts["host_ms"] = float((parts.step_ms - parts.asleep_ms).mean(axis=1).max())
    longest = 0.0
    for op in sorted(POINT_TO_POINT):
        names = [f"{name}.{op}" for name in ("comm_ms", "exposed_ms", "bytes")]
        if not set(names) <= run.metrics.keys():
            continue
        comm, bare, size = (positive(run.values(name)).mean(axis=0) for name in names)
        ideal_ms = size / best / 1e6
        bare = np.maximum(bare - taken.get(op, 0.0), 0.0)
        waited += bare * np.clip(1 - ideal_ms / np.maximum(comm, 1e-9), 0.0, 1.0)
        if float(bare.mean()) > longest:
            longest = float(bare.mean())
            facts |= {"op": op, "op_ms": longest, "ideal_ms": float(ideal_ms.mean())}
    ms = np.minimum(waited, exposed)
    facts["quarter_ms"] = float(ms.mean()) / 4
    return CauseFinding("bubble", ms, MOVING, facts=facts) if longest else None


def best_busbw(judged: Run) -> float:
    """GB/s of the run's fastest calls, or of a slow link."""
    rates = [row.busbw_gb_s for row in judged.collective_rows if row.busbw_gb_s is not None]
    return max([SLOWEST_LINK_GB_S, *rates])


def _num_ranks(judged: Run, op: str) -> int:
    sizes = [row.num_ranks for row in judged.collective_rows if row.op == op and row.num_ranks]
    return max(sizes, default=len(judged.ranks))


def _no_prefetch(
    run: Run, parts: Parts, exposed: Floats, taken: dict[str, Floats], details: Exposure | None
) -> CauseFinding | None:
    """Gathers that nothing hides, though there is as much compute as they take: they are issued too late, or
    the kernels that should hide them leave them no multiprocessor to start on."""
    if not {f"{name}.all_gather" for name in ("comm_ms", "exposed_ms", "count")} <= run.metrics.keys():
        return None
    if not gathers_parameters(run):
        return None
    gather = positive(run.values("comm_ms.all_gather")).mean(axis=0)
    bare = positive(run.values("exposed_ms.all_gather")).mean(axis=0)
    count = float(positive(run.values("count.all_gather")).mean())
    total, alone = float(gather.sum()), float(bare.sum())
    if count < MIN_GATHERS or total <= 0 or 1 - alone / total >= HIDDEN_ENOUGH:
        return None
    compute = parts.compute_ms.mean(axis=0)
    left = np.maximum(bare - taken.get("all_gather", 0.0), 0.0)
    hideable = np.minimum(np.minimum(left, exposed) * (1 - 1 / count), compute)
    facts = {
        "count": count,
        "gather_ms": float(gather.mean()),
        "hidden": 1 - alone / total,
        "compute_ms": float(compute.mean()),
        "how": "without prefetch",
    }
    num_held, held_ms = details.held_back if details is not None else (0.0, 0.0)
    if 2 * num_held > count:
        facts |= {
            "origin": "held",
            "how": "that compute keeps waiting",
            "held": f"{num_held:.0f}",
            "late_ms": held_ms / num_held,
        }
    return CauseFinding("no_prefetch", hideable, MOVING, facts=facts)


def _shared_communicator(details: "Exposure | None", exposed: Floats) -> CauseFinding | None:
    if details is None or details.queued_ms <= 0:
        return None
    return CauseFinding(
        "shared_communicator",
        min(1.0, details.queued_ms / float(exposed.mean())) * exposed,
        MOVING,
        facts={"what": details.queued_what, "queued_ms": details.queued_ms},
    )


def _largest(judged: Run, details: "Exposure | None", ops: Sequence[str]) -> dict[str, object]:
    """What of these operations sticks out most, for the words."""
    facts: dict[str, object] = {"what": "communication", "op": ""}
    by_call = {} if details is None else {key: one for key, one in details.by_call.items() if key[0] in ops}
    all_ms = sum(entry[0] for entry in by_call.values())
    if details is not None and all_ms > 0:
        (op, module, group), (ms, size, num) = max(by_call.items(), key=lambda item: item[1][0])
        same_op = [entry for key, entry in by_call.items() if key[0] == op]
        same_ms = sum(entry[0] for entry in same_op)
        name = f"{op} of {module}" if module else op
        if ms < 0.5 * same_ms and module:
            name = f"{op} (most in {module})"
            ms, num = same_ms, sum(entry[2] for entry in same_op)
            size = max(entry[1] for entry in same_op)
        others = "" if same_ms >= MOST_OF_ALL * all_ms else " and other operations"
        name = name.replace(UNKNOWN_OP, "calls of no known operation")
        of_group = f" ({group} group)" if group and not group.isdecimal() else ""
        largest = f", the largest of {byte_text(size)}" if size else ""
        if op in UNIT_OPS and judged.source != "host" and is_one_unit(judged.noted):
            facts["one_unit"] = one_unit_text(judged)  # on a CPU gathers hide behind nothing, however many
        return facts | {
            "what": f"{name}{of_group}{others}",
            "op": op,
            "op_ms": ms,
            "origin": _origin(judged, details, op),
            "largest": name,
            "calls": f"{counted(num, 'call')}{largest}",
            "example": details.example,
        }
    by_op = {op: judged.mean_of(of_operation("exposed_ms", op)) or 0.0 for op in ops if op}
    if any(by_op.values()):
        op = max(by_op, key=lambda name: by_op[name])
        others = "" if by_op[op] >= MOST_OF_ALL * sum(by_op.values()) else " and other operations"
        facts |= {"what": op + others, "op": op, "op_ms": by_op[op]}
    return facts


def _origin(judged: Run, details: Exposure | None, op: str, of_small: bool = False) -> str:
    """What an operation is exposed longest for, or most of its small calls are for: bucket, unit, gradients
    that the program reduces itself, or program."""
    weights: dict[str, float] = defaultdict(float)
    has_units = op in UNIT_OPS and gathers_parameters(judged)
    for key, (ms, _, _) in (details.by_call if details is not None else {}).items():
        name, module, _ = key
        weight = details.num_small[key] if details is not None and of_small else ms
        if name != op or not weight:
            continue
        if _is_bucket(module):
            weights["bucket"] += weight
        elif module == OF_ZERO:
            weights["zero"] += weight
        else:
            weights["unit" if module and has_units else "program"] += weight
    origin = max(weights, key=lambda origin: weights[origin], default="")
    by_hand = origin == "program" and op == "all_reduce" and _is_every_gradient(judged)
    are_weights = origin == "program" and op in (*TO_ONE, "broadcast") and _are_all_weights(judged)
    if are_weights and _come_by_one_rank(judged):
        return "one_rank"
    return "gradients" if by_hand else "weights" if are_weights and op == "broadcast" else origin


def _is_bucket(module: str) -> bool:
    return module.startswith("bucket ")


def exposure(run: Run) -> Exposure | None:
    """From the first judged steps with details, of the first and the last rank. Where none has segments, from
    those with calls: units are known then, and not what is exposed of which call."""
    are_kept = run.has_details if run.has_details[run.judged_steps].any() else run.has_collectives
    detailed_steps = set(run.global_step[run.judged_steps][are_kept[run.judged_steps]].tolist())
    if not detailed_steps:
        return None
    by_call: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    queued: dict[str, float] = defaultdict(float)
    held_ms: list[float] = []
    num = 0
    launching_ms = 0.0
    num_updates: list[int] = []
    longest: tuple[float, tuple[int, int, float, float]] | None = None
    of_parameters = parameter_dtype(run.noted)
    wide: dict[str, Wide] = {}
    unit_launch_ms: list[float] = []
    ranks = {run.ranks[0]} if run.source in TRACE_SOURCES else {run.ranks[0], run.ranks[-1]}
    lines = {}
    for rank in sorted(ranks):
        steps = (record for record in run.records(rank) if record.global_step in detailed_steps)
        lines[rank] = [*islice(steps, DETAILED_STEPS)]
    units, group = _units(run, lines)
    for rank, records in lines.items():
        for record in records:
            bare = exposed_spans(record)
            num += 1
            # Optimizers that step one after the other, without a backward pass between, are one update.
            spans = [span.kind for span in record.host_spans or () if span.kind in ("backward", "optimizer")]
            num_updates.append(sum(pair == ("backward", "optimizer") for pair in pairwise(spans)))
            for call in record.collectives or ():
                entry = by_call[call.op, record.module_of(call), call.group]
                entry[1] = max(entry[1], call.bytes or 0)
                entry[2] += 1
                entry[3] += (call.bytes or 0) <= SMALL_BYTES
                if _part_beyond(call, of_parameters):
                    row = wide.setdefault(call.op, Wide(str(of_parameters), call.dtype, 0.0, 0.0))
                    row.bytes += call.bytes or 0
            for ms, call in _shares(record, bare):
                by_call[call.op, record.module_of(call), call.group][0] += ms
                if beyond := _part_beyond(call, of_parameters):
                    wide[call.op].part += min(ms, beyond * ((call.end_ms or 0.0) - (call.start_ms or 0.0)))
            for queued_call, ms in _queued(record, bare):
                queued[queued_call] += ms
            held_ms += _held_back_ms(record)
            for start, end in bare.tolist():
                if longest is None or end - start > longest[0]:
                    longest = end - start, (rank, record.global_step, start, end)
    if not num:
        return None
    ops = () if units is None else units.ops
    launched = _launched(run, lines)
    for record in launched:
        of_units = [
            call
            for call in record.collectives or ()
            if call.op in ops and call.group == group and record.module_of(call)
        ]
        unit_launch_ms.append(launch_ms_of_unit(of_units))
        launching_ms += _small_launches_ms(record, of_units)
    for op, row in wide.items():
        total_ms = sum(entry[0] for key, entry in by_call.items() if key[0] == op)
        row.part = row.part / total_ms if total_ms > 0 else 0.0
        row.bytes /= num
    worst = max(queued, key=lambda queued_call: queued[queued_call], default="")
    return Exposure(
        {key: (ms / num, int(size), max(1, round(n / num))) for key, (ms, size, n, _) in by_call.items()},
        {key: round(entry[3] / num) for key, entry in by_call.items()},
        sum(queued.values()) / num,
        worst,
        (len(held_ms) / num, sum(held_ms) / num),
        launching_ms / max(len(launched), 1),
        None if longest is None else longest[1],
        max(1, int(np.median(num_updates))),
        wide,
        units,
        float(np.median(unit_launch_ms)) if launched else 0.0,
    )


def _launched(run: Run, lines: Mapping[int, Sequence[StepRecord]]) -> list[StepRecord]:
    """Those of which launches are known; where they are of none, as in later steps, whose calls nobody saw,
    judged ones that were recorded before."""
    records = [record for of_rank in lines.values() for record in of_rank]
    if run.source != "kernels" or any(_has_launches(record) for record in records):
        return records
    whole = run.whole
    steps = set(whole.global_step[whole.judged_steps].tolist())
    for rank in lines:
        of_rank = (record for record in whole.records(rank) if record.global_step in steps)
        records += islice((record for record in of_rank if _has_launches(record)), DETAILED_STEPS)
    return [record for record in records if _has_launches(record)]


def _has_launches(record: StepRecord) -> bool:
    return any(call.launch_ms is not None for call in record.collectives or ())


def _units(judged: Run, lines: Mapping[int, Sequence[StepRecord]]) -> tuple[Units | None, str | None]:
    """Units that are too many, and their group. Where the program is known it has to have made as many: what
    tensor parallel ranks gather has modules, too."""
    bytes_of: dict[tuple[bool, str], dict[str, int]] = defaultdict(dict)
    for record in (record for records in lines.values() for record in records):
        for call in record.collectives or ():
            name = record.module_of(call)
            if _is_bucket(name) or (name and call.op == "all_gather"):
                bytes_of[_is_bucket(name), call.group][name] = call.bytes or 0
    are_known = bool(noted_program(judged.noted))
    are_usual = are_known and "buckets_small" not in program_of(judged.noted)[0]
    for (are_buckets, group), of in sorted(bytes_of.items(), key=lambda one: (one[0][0], -len(one[1]))):
        if are_buckets and not are_usual and judged.source != "host":
            return buckets_of(of), group
        if not are_buckets and (
            len(of) <= num_units(judged.noted) if are_known else _are_units(lines, group)
        ):
            return units_of(of), group
    return None, None


def _are_units(lines: Mapping[int, Sequence[StepRecord]], group: str) -> bool:
    """Whether each module has its gather before any of them is reduced: tensor parallel ranks reduce what one
    layer gives before they gather for the next."""
    for record in (record for records in lines.values() for record in records):
        calls = sorted(record.collectives or (), key=lambda call: call.start_ms or 0.0)
        of_group = [call for call in calls if call.group == group and call.op in UNIT_OPS]
        named = [(name, call.op) for call in of_group if (name := record.module_of(call))]
        gathered = {name for name, _ in takewhile(lambda one: one[1] == "all_gather", named)}
        if not any(op == "reduce_scatter" for _, op in named) or not {name for name, _ in named} <= gathered:
            return False
    return True


def _part_beyond(call: CollectiveRecord, parameter_dtype: str | None) -> float:
    """Of a large call's bytes, what it would not move in the parameters' dtype."""
    if parameter_dtype is None or call.dtype not in FLOATS or (call.bytes or 0) <= SMALL_BYTES:
        return 0.0
    return max(1 - FLOATS[parameter_dtype] / FLOATS[call.dtype], 0.0)


def _small_launches_ms(record: StepRecord, but: Sequence[CollectiveRecord]) -> float:
    """Number of other small calls of a step times what one costs the host: a short time between two launches,
    since the program may do something else in a longer one."""
    left_out = {id(call) for call in but}
    launches = np.sort(
        [
            call.launch_ms
            for call in record.collectives or ()
            if call.launch_ms is not None and call.bytes is not None and call.bytes <= SMALL_BYTES
            if id(call) not in left_out
        ]
    )
    if len(launches) < MANY_CALLS:
        return 0.0
    return len(launches) * float(np.percentile(np.diff(launches), SHORT_PERCENTILE))


def exposed_spans(record: StepRecord) -> Intervals:
    """Stretches of the window with communication and no compute."""
    rows = [
        (segment.start_ms, segment.end_ms)
        for segment in record.active_segments or ()
        if "compute" not in segment.active_streams and any(name != "copy" for name in segment.active_streams)
    ]
    return union(np.array(rows, dtype=np.float64).reshape(-1, 2))


def _shares(record: StepRecord, bare: Intervals) -> Iterator[tuple[float, CollectiveRecord]]:
    """What each call sticks out, of concurrent ones the one that ends last: it is what compute waits for."""
    calls = [
        call for call in record.collectives or () if call.start_ms is not None and call.end_ms is not None
    ]
    left = bare
    for call in sorted(calls, key=lambda call: -(call.end_ms or 0.0)):
        call_span = np.array([[call.start_ms, call.end_ms]], dtype=np.float64)
        part = intersect(left, call_span)
        ms = length_ms(part)
        if ms > 0:
            yield ms, call
            left = subtract(left, call_span)


def _held_back_ms(record: StepRecord) -> Iterator[float]:
    """Of each gather that had been launched, was next of its communicator, and started in the midst of
    compute, how late. What waits for an event of a kernel starts where that kernel ends; this one waits for
    blocks of a kernel to leave multiprocessors."""
    segments = record.active_segments or ()
    rows = [(one.start_ms, one.end_ms) for one in segments if "compute" in one.active_streams]
    busy = union(np.array(rows, dtype=np.float64).reshape(-1, 2))
    free_ms: dict[tuple[str, tuple[int, ...]], float] = {}
    for call in sorted(record.collectives or (), key=lambda call: call.start_ms or 0.0):
        if call.launch_ms is None or call.start_ms is None or call.end_ms is None:
            continue
        group = call.group, tuple(call.ranks)
        ready_ms = max(call.launch_ms, free_ms.get(group, call.launch_ms))
        free_ms[group] = call.end_ms
        within = busy[(busy[:, 0] < call.start_ms) & (busy[:, 1] > call.start_ms + EVENT_MS)]
        if call.op == "all_gather" and len(within):
            late_ms = call.start_ms - max(ready_ms, float(within[0, 0]))
            if late_ms > EVENT_MS:
                yield late_ms


def _queued(record: StepRecord, bare: Intervals) -> Iterator[tuple[str, float]]:
    """Exposed time in which a call that had been launched stood behind a larger one of its communicator."""
    by_group: dict[tuple[str, tuple[int, ...]], list[CollectiveRecord]] = defaultdict(list)
    for call in record.collectives or ():
        if call.start_ms is not None and call.end_ms is not None:
            by_group[call.group, tuple(call.ranks)].append(call)
    for calls in by_group.values():
        calls.sort(key=lambda call: call.seq)
        for front, behind in zip(calls, calls[1:], strict=False):
            assert front.end_ms is not None
            assert behind.start_ms is not None
            assert behind.end_ms is not None
            asked_ms = behind.start_ms if behind.launch_ms is None else min(behind.launch_ms, behind.start_ms)
            is_behind = front.is_async and not behind.is_async and behind.end_ms >= front.end_ms - 0.05
            if not is_behind or front.end_ms <= asked_ms:
                continue
            if (front.bytes or 0) < QUEUED_RATIO * max(behind.bytes or 0, 1):
                continue
            waiting = np.array([[asked_ms, min(front.end_ms, behind.end_ms)]])
            ms = length_ms(intersect(bare, waiting))
            if ms > 0:
                yield f"{behind.op} of {behind.bytes} bytes behind {front.op} of {front.bytes} bytes", ms
