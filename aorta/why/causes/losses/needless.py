"""Work of the model itself that training may do without: done twice, in wider types than the rest, for
gradients that nobody reads, for rows that nobody looked up, from nothing that changes, or in attention that
is not fused; and what a loss, few threads and new pages of memory take beside it.

The FLOPs that `aorta run` counts on a copy of the model without data tell it: it takes its part of the time
of all kernels, of which no more is known. What names of kernels tell is in kernels_by_name.py.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from aorta.account.judge.cells import Account
from aorta.account.judge.cores import cores_had
from aorta.account.judge.phases import phases_of
from aorta.account.judge.stacks import (
    FEWEST,
    WeightedStack,
    is_of_torch,
    sampled,
    sampled_ms,
    samples_of_ranks,
)
from aorta.account.load.measures import noted_modes, noted_program, num_threads
from aorta.account.load.rank.host import FAULTS, READY, SYSTEM
from aorta.account.load.rank.kernels import NAME_TIME
from aorta.account.load.rank.phases import PREFIX
from aorta.account.metrics import operations
from aorta.account.model import Run, once_of_run
from aorta.account.numbers import counted, number, percent
from aorta.account.rows import positive
from aorta.records.schema import LineOfWork, LossLoop, OperatorLoop, WorkOfStep
from aorta.records.stacks import Function, StackFrame
from aorta.timeline.arrays import Floats
from aorta.why.causes.finding import OF_SAMPLES, WAIT, CauseFinding
from aorta.why.causes.losses.host_needs import MOSTLY_IDLE
from aorta.why.causes.losses.kernels_by_name import (
    ADDS,
    COPIES,
    FP64_MORE,
    HALF,
    LARGE,
    LEAST,
    NEARLY_ALL,
    PRODUCTS,
    TAKES,
    ZEROS,
    all_in_fp64,
    beside_model_ms,
    finding_of,
    finding_within,
    memory_used,
    of_kernels,
    time_of,
    time_of_class,
)
from aorta.why.causes.losses.parts import (
    BUSY_CPU_BYTES_PER_S,
    CPU_BYTES_PER_S,
    FUSED_SAVES,
    WORK,
    beside_others,
    part_of_device,
    work_ms_of,
)
from aorta.why.causes.program import noted_line, part_of_optimizers, program_of
from aorta.why.causes.source import pieces_of_run, source_of

CROSS_ENTROPY = 5 / 8
"""Of what one function for a loss is counted to move, that torch's moves on a device: log_softmax reads and
writes, and reads two and writes one backward."""
PAGE_BYTES = 4096
"""Of the smallest page."""
ATTENDS = re.compile(r"(scaled_dot_product|sdpa|flash|eager)_\w*attention")
"""Functions of torch and transformers that go through scores, and through no projections."""
SIXTEEN = ("bf16", "fp16")
OF_OTHERS = re.compile(
    r"\b(np|numpy|pd|scipy|json|cv2|Image|open|loads?|split|random|rng|from_numpy|as_tensor|tensor)\b[.(]"
)
"""In lines that may parse, decode, draw or copy beside what they compute with tensors."""
LARGE_CASTS, PASSES_OF_CASTS = 1e5, 100
"""Bytes in fp64, of which a cast tells what computed them: of less it takes no time; and times that these go
through memory before at most, as larger ones of which they are made do."""
OF_WEIGHTS = re.compile(r"_(Orthogonal|WeightNorm|SpectralNorm)\.forward$")
"""Functions of torch.nn.utils.parametrizations."""
ALL_ALIKE = 0.995
"""Part of what fills rows up, from which on it fills all rows of their batch: no row is longer."""
LARGE_PADDING = 0.3
"""Of tokens: batches of lengths that chance put together have some."""
MOST_OF_A_FAULT_MS = 0.005
"""CPU time of the system for a page of 4 KiB, to map, clear and give back, at most: 1.8 and 1.9 us on a
virtual machine. What the system takes beyond is of other calls."""
TICK_MS = 10.0
"""Of the slowest of the clocks by which systems tell whose time it is."""
FEWEST_OF_FAULTS = 4
"""Recorded steps."""
CAUSAL_SAVES = 0.6
"""Of attention with a causal mask given as a tensor: 6.4 of 10.5 ms on an H200."""
OF_SOLVES = (1.5, 3.5)
"""Times that both passes of factorizations and solves take the forward one: three planted programs took 1.6,
2.9 and 3.5 times."""
SOLVES = re.compile(
    r"getr[fs]|getf2|laswp|trs[mv]|potr[fs]|potf2|geqr|larf|(or|un)[gm]qr|(sy|he)(ev|trd)|gebrd|stedc", re.I
)
"""Kernels of factorizations, and of what is solved with them, whose FLOPs nobody counts."""
SMALL_CALL_MS = 0.025
"""Of an operator and its part of the calls of modules around it: one that takes longer computes."""
OPERATOR_MS = 0.003
"""CPU time that an operator of eager PyTorch needs beside its arithmetic, forward and backward: the 6,708 of
a planted graph network's step take 4.6 us each, and 20 ms less in all when they are stacked (AMD EPYC)."""
MOST_OF_WORK = 0.8
CORE_FLOPS_PER_S = 1e10
"""What a core reaches at least in fp32, in products of some size."""
READS_GRADIENTS = re.compile(r"\.grad\b|register_hook|retain_grad|checkpoint")
"""Of the program's source: what may need gradients of what a model is given."""
MANY_CALLS = 4
"""Of the model, in a step: several have reasons (images of a pair, a triplet)."""
OF_A_CALL_MS, AT_MOST_MS = 0.005, 0.1
"""CPU time of an operator, whatever its rows: of most, and of small convolutions beyond what one of more rows
takes."""
PASSES_OF_ZEROS = 4
"""Over gradients that are set to zero and added to: written, read with what is added, and written."""
SLOWEST_BYTES_PER_S = 1e9
"""At which operators of a loss, with powers and logarithms, go through memory on a CPU at least."""
FROM_CACHES_BYTES_PER_S = 4e10
"""Of a core: at which it goes through weights that lie in its caches."""
PASSES_OF_WEIGHTS = 6
"""Over the parameters, in each call: read in both passes, gradients written, and added to those before."""
LARGE_BYTES = 8e6
"""A step, below which what passes through memory stays in caches."""
MUCH_LONGER = 1.5
"""Of the usual step's work, above which a step has more to do than the usual one."""
THREADS_SAVE = 0.7
"""Of what as many more threads would in proportion: 0.64 and 0.69 of two planted steps, 1 to 2 and 2 to 4."""
SPARSE_MS, SPARSE_ROW_MS, SPARSE_BYTE_MS = 0.3, 4e-4, 5.5e-6
"""CPU time of a sparse backward pass and SparseAdam: a step, a row that is looked up, its bytes. Of 11 sizes,
256 to 32768 rows of 32 B to 2 KiB, 1.1 to 2.9 times what was measured; of Adagrad 1.7 to 4.5 times."""
SPARSE_LEAST = 0.2
"""Of that, where a step looks up the same rows several times: 0.19 with a quarter of them different."""
WORTH_SAYING = 0.04
"""Of a step, from which on waits for a core hold up a device."""
HELD_UP: tuple[str, ...] = ("core_taken", "launch", "blocked", "data", *WAIT)
"""Cells that a host without a core fills."""
MOST_USED = 0.75
"""Of the cores, by threads and workers: others have something to do."""
FLOPS_PER_BYTE = 8.0
"""Of a CPU's core: what it multiplies while a byte passes through its memory."""
SPARE = 0.5
"""Of the device's memory, that must be free for activations to be kept."""


KINDS = {
    "again": "activations computed again",
    "unread": "gradients that nobody reads",
    "inputs": "gradients of what the model is given, which nobody reads",
    "discarded": "gradients that are set back before an optimizer takes them",
    "scores": "attention computed eagerly",
    "one_hot": "a matrix product with one-hot rows",
    "zeros": "products with a matrix of zeros",
    "masked": "rows that are computed and then multiplied by zero",
    "unused": "results of products that nothing reads",
    "merged": "gradients of whole weights, of which small factors train",
    "repeated": "what a forward pass computes once more from the same",
    "unfolded": "convolutions made of unfold() and a product",
    "spread": "products of rows that were repeated before",
    "widened": "a product of wide rows that the next one makes narrow",
    "hoisted": "weights computed from others again and again",
    "backwards": "backward passes through the same operators",
    "grown": "a tensor that torch.cat makes longer part by part",
    "unchanged": "the same result computed in every step",
    "twice": "the same batch forward once more",
    "before": "a frozen module on what it was called with before",
}
"""Of WorkOfStep, whose fields are FLOPs, bytes and the line of each; which of them has the same ms is told by
this order."""
PASSES_OF_A_COPY = 8
"""On a CPU, which reads and writes in both passes, at half the rate of what lies in order: copies around the
layers of a planted convolution net took 12.7 of 49 ms."""
LARGE_COPIES = 0.15
"""Of a step on a CPU: attention needs some between its heads."""
WITH_BYTES = ("unread", "inputs", "discarded", "unused", "masked", "merged", "backwards", "before")
"""Of which FLOPs alone are counted: as much of the bytes goes with them."""
OF_BACKWARD = ("unread", "inputs", "discarded", "merged")
"""Which backward passes alone do."""
OF_CPUS = ("spread", "unfolded")
UNFOLDED_SAVES = 0.75
"""Of them, that convolutions do not take on a CPU: of five sizes in one thread, 0.62 to 0.94."""
WITHOUT_PAGES = ("handed", "rows")
"""Losses that have none of their new pages in them."""
BESIDE = ("backwards", "twice", "before")
"""What the FLOPs of the step do not hold, and its time does."""
PASSES_AT_MOST = 3
"""Times their backward part, that both passes of a step take on a CPU: mostly 1.5 times."""
AS_SEEN, OF_ITS_LINE = ("grown", "hoisted", "unchanged", "twice", "before"), ("grown", "hoisted")
"""As long as samples show all of their function, or their line."""


def needless_work(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """Without what is too little to name, which would take from what is. Of new pages as much goes with what
    else is needless as of what is computed."""
    least_ms = LEAST * account.mean_step_ms
    found = [one for one in _all_of_it(judged, account) if one.is_risk or one.mean_ms >= least_ms]
    yield from found
    goes_ms = sum(one.mean_ms for one in found if one.facts["op"] not in WITHOUT_PAGES)
    work_ms = float(work_ms_of(account).mean())
    for pages in _pages(judged, account):
        pages.shorten(max(1 - goes_ms / max(work_ms, 1e-9), 0.0))
        if pages.mean_ms >= least_ms:
            yield pages


def _all_of_it(judged: Run, account: Account) -> Iterator[CauseFinding]:
    work = judged.noted.work or WorkOfStep()
    yield from of_kernels(judged, account, work)
    if not account.on_device and _is_in_fp64(judged, work):
        ms = work_ms_of(account)
        in_passes = [judged.mean_of_host(f"{PREFIX}{name}") or 0.0 for name in ("forward", "backward")]
        if in_passes[1]:  # beside them is what the program does itself
            ms = ms * min(sum(in_passes) / max(float(ms.mean()), 1e-9), 1.0)
        ms, takes = beside_others(account, ms)
        if work.flops:  # small operators take as long in fp32
            cores_s = num_threads(judged.noted) * CORE_FLOPS_PER_S
            ms = np.minimum(ms, 1e3 * (2 * work.fp64 / cores_s + work.bytes / CPU_BYTES_PER_S))
        yield all_in_fp64(judged, work, ms, takes)
    elif work.narrowed_at is not None and not work.fp64 and not account.on_device:
        yield from _narrowed(judged, work, work.narrowed_at)
    if work.causal and account.on_device:
        ms = work.causal / work.attention * time_of_class(judged, "attention")
        what, saved_ms = "attention with a mask that is_causal says", CAUSAL_SAVES * ms
        yield finding_of("causal", what, work.causal_at, saved_ms, masked_ms=float(ms.mean()))
    if work.flops:
        yield from _emulated(judged, account, work)
        yield from _calls_of_few_rows(judged, account, work)
        yield from _zeroed(judged, account, work)
        yield from _counted(judged, account, work)


def loss_loop(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What a loop over operators takes between the model and its loss, and as many in the backward pass; of
    few that hand on large tensors, what goes through memory beyond one function for all; or of those that go
    through weights: their part of the time by bytes, and of what a device waits for launches their part of
    the step's operators."""
    loop, work = judged.noted.loss_loop, judged.noted.work
    if loop is None:
        return
    facts: dict[str, object] = {
        "op": "loss",
        "what": f"{loop.operators:,} operators between the model and its loss",
        "operators": loop.operators,
        "part_ms": loop.ms,
    }
    part_ms = loop.ms
    if loop.least_bytes:
        facts |= {"origin": "handed", "what": f"{loop.operators} operators of a loss that is made by hand"}
        facts |= {"loss_bytes": loop.bytes, "one_bytes": loop.least_bytes}
        if account.on_device:
            yield from _handed_in_loss(judged, account, loop, facts)
            return
        if part_ms is None:
            return
        facts["least_part"] = HALF
        part_ms = min(part_ms, 1e3 * loop.bytes / SLOWEST_BYTES_PER_S) * (1 - loop.least_bytes / loop.bytes)
    elif loop.weights_bytes >= LARGE_BYTES:
        those, hardware = counted(loop.parameters, "parameter"), part_of_device(judged)
        rate = CPU_BYTES_PER_S if hardware is None else hardware.memory.sustained_hbm_bytes_per_s
        part_ms = 1e3 * loop.weights_bytes / rate
        if loop.ms is not None:
            part_ms = loop.ms * loop.weights_bytes / loop.bytes
        facts = {"op": "weights", "what": f"operators on {those} between the model and its loss"}
        facts |= {"weights_bytes": loop.weights_bytes, "moved_ms": part_ms}
    if part_ms is None:
        return
    if account.on_device:
        # Forward, backward, and once more to add each gradient to the model's own.
        num, lines = 2 * loop.operators + loop.parameters, work and work.lines
        launched = num / (num + sum(line.operators for line in lines)) if lines else 0.0
        launch_ms = launched * account.mean_ms("launch")
        facts |= {"launched": launched, "spared_ms": launch_ms or None, "num_launched": num}
        of_launches = launch_ms / (part_ms + launch_ms)
        takes: dict[tuple[str, ...], float] = {WORK: 1 - of_launches, ("launch",): of_launches}
        both_ms = np.full_like(work_ms_of(account), part_ms + launch_ms)
        yield CauseFinding("compute", both_ms, takes, facts=facts)
        return
    taken = 1 + account.mean_ms("core_taken") / max(account.mean_ms(*WORK), 1e-9)
    # Of what ranks compute, and as much of what others take of their cores meanwhile.
    work_ms = work_ms_of(account)
    both_ms, takes = beside_others(account, work_ms)
    yield CauseFinding("compute", part_ms / taken / float(work_ms.mean()) * both_ms, takes, facts=facts)


def _handed_in_loss(
    judged: Run, account: Account, loop: LossLoop, facts: dict[str, Any]
) -> Iterator[CauseFinding]:
    """What operators of a loss move on a device beyond one function for all: at its memory's rate, to what of
    the kernels that memory bounds is left beside the model's and that function."""
    hardware = part_of_device(judged)
    if hardware is None or "compile" in program_of(judged.noted)[0]:  # what fell back is a loss of its own
        return
    ms_of_byte = 1e3 / hardware.memory.sustained_hbm_bytes_per_s
    least_ms = (loop.bytes - loop.least_bytes) * ms_of_byte
    most_ms = (beside_model_ms(judged) or 0.0) - CROSS_ENTROPY * loop.least_bytes * ms_of_byte
    if least_ms >= most_ms:
        facts |= {"is_least": True, "not_known": "what its kernels take beyond that"}
        most_ms = least_ms
    yield finding_within(account, least_ms, most_ms, at=None, **facts)


def _emulated(judged: Run, account: Account, work: WorkOfStep) -> Iterator[CauseFinding]:
    """Products in a type of two bytes that a CPU has no instructions for: what it takes beyond fp32."""
    modes = noted_modes(judged.noted)
    types = modes.get("cpu_multiplies")
    if account.on_device or work.precision not in SIXTEEN or types is None or work.precision in types:
        return
    ms, takes = beside_others(account, work_ms_of(account))
    in_fp32_s = work.flops / (num_threads(judged.noted) * CORE_FLOPS_PER_S) + 2 * work.bytes / CPU_BYTES_PER_S
    what, least_ms = f"products in {work.precision}", positive(ms - 1e3 * in_fp32_s)
    found = finding_of(
        "emulated", what, work.model_at, least_ms, takes, work_ms=float(ms.mean()), is_least=True
    )
    found.facts |= {"in_fp32_ms": 1e3 * in_fp32_s, "dtype": work.precision}
    found.facts["not_known"] = "by how much fp32 takes less than that"
    yield found


def _is_in_fp64(judged: Run, work: WorkOfStep) -> bool:
    """All the model's products; where nobody counted them, its parameters, if they are large."""
    if not work.flops:
        sizes = Counter[str]()
        for row in noted_program(judged.noted).get("optimizers") or []:
            sizes.update(row.get("bytes_of_dtypes") or {})
        return bool(sizes["float64"] >= max(NEARLY_ALL * sizes.total(), LARGE_BYTES))
    return work.flops - work.fp64 < LARGE * work.fp64


def _narrowed(judged: Run, work: WorkOfStep, at: StackFrame) -> Iterator[CauseFinding]:
    """Of a function that computes in fp64 and casts what it has, by its samples: not of a data set, nor of
    the loop, which calls the model, and not where lines of it do something else than compute with tensors."""
    samples, seen, loops = samples_of_ranks(judged.whole), list[WeightedStack](), set[Function]()
    for one in samples:
        in_passes = one.is_judged & one.in_phase("backward", "optimizer")
        loops |= {frame.function_id for stack in one.chosen(in_passes) for frame in stack.frames}
        others = one.chosen(one.is_judged & ~one.in_phase("data", "backward", "optimizer"))
        seen += [stack for stack in others if any(map(partial(_is_before, at), stack.frames))]
    if work.narrowed_bytes < LARGE_CASTS or len(seen) < FEWEST or at.function_id in loops:
        return
    source = source_of(at.file, judged.noted)
    lines = [] if source is None else source.text.decode(errors="replace").splitlines()
    seen_ms = sum(stack.ms for stack in seen)
    own_ms = sum(stack.ms for stack in seen if _computes_with_tensors(stack.frames, at, lines))
    if own_ms < NEARLY_ALL * seen_ms:
        return
    most_ms = 1e3 * PASSES_OF_CASTS * work.narrowed_bytes / CPU_BYTES_PER_S
    seen_ms = min(seen_ms / len(samples), most_ms)
    found = finding_of("fp64", "work in fp64", at, np.full(judged.num_judged, FP64_MORE * seen_ms))
    found.facts["narrowed_bytes"] = work.narrowed_bytes
    found.more_ms, found.num_samples = (1 - FP64_MORE) * seen_ms, len(seen)
    yield found


def _is_before(at: StackFrame, frame: StackFrame) -> bool:
    """In its function, and no line behind it."""
    return frame.function_id == at.function_id and frame.line <= at.line


def _computes_with_tensors(frames: list[StackFrame], at: StackFrame, lines: list[str]) -> bool:
    """Whether a sample is in a function of torch's, or in a line of the function that names nothing else."""
    place = max(place for place, one in enumerate(frames) if one.function_id == at.function_id)
    is_own = place == len(frames) - 1 or all(map(is_of_torch, frames[place + 1 :]))
    number = frames[place].line
    return is_own and 0 < number <= len(lines) and not OF_OTHERS.search(lines[number - 1])


def _counted(judged: Run, account: Account, work: WorkOfStep) -> Iterator[CauseFinding]:
    """What takes its part of the time of all kernels but an optimizer's."""
    optimizer = time_of_class(judged, "optimizer")
    ms, takes = positive(work_ms_of(account) - optimizer), TAKES
    if not account.on_device:
        ms, takes = beside_others(account, ms)
    products = np.minimum(sum(time_of_class(judged, name) for name in PRODUCTS), ms)

    def part_ms(flops: float, num_bytes: float) -> Floats:
        """Products by their FLOPs, the rest by its bytes; of both where no kernels tell them apart."""
        if account.on_device and products.any() and work.bytes:
            return flops / work.flops * products + num_bytes / work.bytes * (ms - products)
        weight = 0.0 if account.on_device else FLOPS_PER_BYTE
        return (flops + weight * num_bytes) / (work.flops + weight * work.bytes) * ms

    def seen(at: StackFrame | None, lines: range | None = None, own: bool = False) -> tuple[float, int]:
        """ms of samples in the function of a line, or in lines of it, and how many; none of a device."""
        if at is None or account.on_device:
            return 0.0, 0
        samples = sampled(judged, *at.function_id, lines, own)
        return sum(samples), len(samples)

    finding = partial(finding_of, takes=takes)
    in_backward_ms = None if account.on_device else judged.mean_of_host(f"{PREFIX}backward")
    passes_ms = PASSES_AT_MOST * (in_backward_ms or 0.0)
    used = memory_used(judged)
    same_at = None if work.unchanged_at is None else work.unchanged_at.text
    facts_of: dict[str, dict[str, Any]] = {
        "again": {"launched": work.again_launched, **({} if used is None else used._asdict())},
        "scores": {"moved_bytes": work.scores_bytes},
        "grown": {"grown_bytes": work.grown_bytes},
        "unchanged": {"same_at": same_at},
        "unused": {"ignored": percent(work.ignored) if work.ignored else None},
        "discarded": {
            "given_at": work.discarded_of.text if work.discarded_of else None,
            "apart_at": work.discarded_of.text if work.discarded_of and work.discarded_is_apart else None,
        },
        "repeated": {"part_of_bytes": percent(work.repeated_bytes / work.bytes) if work.bytes else None},
        "unread": {
            "apart_at": work.unread_at.text if work.unread_at and work.unread_is_apart else None,
            "unread_of": work.unread_of or None,
            "unread_num": counted(work.unread_num, "parameter"),
            "unread_parameters": f"the parameters in {work.unread_of}"
            if work.unread_of
            else "parameters that no optimizer has",
        },
    }
    ignored_ms: Floats = np.zeros_like(ms)
    hoisted_ms, is_repeated = 0.0, False
    for op, what in KINDS.items():
        if op == "unused" and work.ignored:
            what = "products at positions whose targets the loss ignores"
        if op == "scores" and work.scores_num:
            what = f"{what} in {counted(work.scores_num, 'layer')}"
        flops, num_bytes = (float(getattr(work, name, 0.0)) for name in (op, f"{op}_bytes"))
        part = flops / work.flops
        if op == "inputs" and flops and _reads_gradients(judged):
            continue
        if op in OF_CPUS and account.on_device:
            continue  # not measured there
        if (
            op == "again"
            and account.on_device
            and (used is None or used.peak_bytes >= SPARE * used.limit_bytes)
        ):
            continue
        lost_ms = part_ms(flops, part * work.bytes if op in WITH_BYTES else min(num_bytes, work.bytes))
        lost_ms = UNFOLDED_SAVES * lost_ms if op == "unfolded" else lost_ms
        if not lost_ms.any():
            continue
        at: StackFrame | None = getattr(work, f"{op}_at")
        beside = work.discarded_beside / work.flops if op == "discarded" else part if op in BESIDE else 0.0
        whole = 1 + beside
        # The program's own code, too, is what ranks compute.
        most_ms = part * passes_ms if op in BESIDE and passes_ms else math.inf
        if op in OF_BACKWARD and in_backward_ms:
            most_ms = min(most_ms, in_backward_ms)
        found = finding(op, what, at, np.minimum(lost_ms / whole, most_ms), **facts_of.get(op, {}))
        found.most_ms = most_ms if op in OF_BACKWARD else found.most_ms
        found.facts["part"] = part / whole or None
        lines = range(at.line, at.line + 1) if op in OF_ITS_LINE and at is not None else None
        seen_ms, num = seen(at, lines) if op in AS_SEEN else (0.0, 0)
        if op == "hoisted" and at is not None and seen_ms:  # and as much backward; of a solve more
            share, num_seen = _part_of_weights(judged, at)
            share = share or max(work.hoisted_share, work.hoisted_solves)
            least, most = OF_SOLVES if work.hoisted_solves >= HALF else (2.0, 2.0)
            hoisted_ms, seen_ms = share * seen_ms, math.sqrt(least * most) * share * seen_ms
            found.facts["least_part"] = math.sqrt(least / most)
            if 0 < num_seen < FEWEST and seen_ms < found.mean_ms:  # they tell the least, and no more
                found.facts["least_part"], seen_ms = seen_ms / found.mean_ms, 0.0
        if seen_ms and (op != "unchanged" or work.unchanged_is_all):
            found.more_ms = 0.0 if lines is None else max(found.mean_ms - seen_ms, 0.0)
            if (least_part := found.facts.get("least_part")) is not None:
                found.more_ms = max(found.more_ms, (1 / least_part - 1) * seen_ms)
            found.ms, found.num_samples = np.full_like(lost_ms, seen_ms), num
        if op == "hoisted" and account.on_device:
            _see_launches_and_solves(found, judged, account, work)
        if op == "repeated" and account.on_device:
            _see_launches(found, account, work, work.repeated_launched)
        elif op == "repeated":
            again = [
                (row, row.forward_again / row.forward_computing) for row in work.lines if row.forward_again
            ]
            of_rows = [
                (part, *seen(row.at, range(row.at.line, row.at.line + 1), own=True)) for row, part in again
            ]
            seen_ms = sum(part * ms for part, ms, _ in of_rows)
            if seen_ms > found.mean_ms:  # what takes longer than its bytes, such as to sort
                found.ms, found.num_samples = np.full_like(lost_ms, seen_ms), sum(num for *_, num in of_rows)
        is_repeated |= op == "repeated" and found.mean_ms >= LEAST * account.mean_step_ms
        if lines is not None and at is not None and account.share("launch") >= LARGE:
            # Its host, which bounds the step, is spared as much in each pass; in one it waits for solves.
            passes = 1 if found.facts.get("solves_ms") else 2
            found.more_ms += passes * sampled_ms(judged, *at.function_id, lines)
        of_row = {"unused": at, "widened": work.widened_of}.get(op)
        row = next((row for row in work.lines if row.at == of_row), None)
        lines = None if of_row is None else range(of_row.line, of_row.line + 1)
        seen_ms, num = seen(of_row, lines, own=True) if row is not None else (0.0, 0)
        if row is not None and row.flops and seen_ms:
            # Forward as samples show, which hold what the memory takes; backward as counted. A row counts
            # what its own line does, not what that calls of the program.
            backward_ms = (1 - row.forward_flops / row.flops) * lost_ms
            found.ms = min(flops / row.flops, 1.0) * seen_ms + backward_ms
            found.num_samples = num
        ignored_ms = found.ms if op == "unused" and work.ignored else ignored_ms
        yield found
    if (grads := work.derivatives) is not None:
        what = f"{counted(grads.num_again, 'call')} of autograd.grad for one more input of the same output"
        # What takes the time is between the products alone and all operators alike.
        least, most = sorted((grads.of_products or grads.of_operators, grads.of_operators))
        part = math.sqrt(least * most)
        found = finding("derivatives", what, grads.at, part * ms, num_grads=f"{grads.num}")
        found.facts["least_part"] = least / part
        found.facts["fewer_operators"] = percent(grads.of_operators)
        found.facts["fewer_products"] = percent(grads.of_products)
        found.more_ms = (most - part) * float(ms.mean())
        if account.on_device:
            _see_launches(found, account, work, grads.of_operators)
        yield found
    if work.copies_bytes and not account.on_device:
        lost_ms = part_ms(0.0, PASSES_OF_A_COPY * work.copies_bytes)
        if lost_ms.mean() >= LARGE_COPIES * account.mean_step_ms:
            yield finding("layout", COPIES, work.copies_at, lost_ms, num_copies=work.copies)
    if not account.on_device and LARGE * work.fp64 <= work.flops - work.fp64:
        part = work.fp64 / (work.flops + work.fp64)  # as they take twice as long
        yield finding("fp64", "work in fp64", work.fp64_at, part * ms, part=2 * part)
    loop = loop_of(work)
    if loop is not None and not account.on_device:
        seen_ms, num = seen(loop.at, range(loop.first_line, loop.last_line + 1))
        if hoisted_ms and work.hoisted_at == loop.at:  # a loss of its own
            seen_ms, loop = max(seen_ms - hoisted_ms, 0.0), _without_hoisted(loop, work)
        work_ms, on_core = float(ms.mean()), takes.get(WORK, 1.0)  # others take cores meanwhile
        if seen_ms:
            # Without what they compute, were each but one operator; as much of a backward pass that is there.
            # A step of nothing but small operators has a low rate because of them: no core is so slow.
            cores_s = num_threads(judged.noted) * CORE_FLOPS_PER_S
            least_s = loop.flops / cores_s + loop.bytes / CPU_BYTES_PER_S
            own_ms = min(float(part_ms(loop.flops, loop.bytes).mean()), 1e3 * least_s / on_core)
            own_ms += seen_ms / loop.iterations
            backward = min(loop.all_operators / loop.operators - 1, 1.0)
            each_ms, lost = seen_ms / loop.operators, (1 + backward) * (seen_ms - own_ms)
        else:
            each_ms, lost = work_ms / loop.all_operators, OPERATOR_MS * loop.all_operators
        if lost > 0 and on_core * each_ms < SMALL_CALL_MS:
            what = f"{loop.all_operators:,} small operators in a loop"
            lost_ms = min(lost / work_ms, MOST_OF_WORK) * ms
            facts: dict[str, Any] = {"iterations": loop.iterations, "each_us": 1e3 * each_ms}
            facts["loop_lines"] = lines_text(loop)
            op = "unchanged" if _is_unchanged(loop, work) else loop.kind
            found = finding(op, what, loop.at, lost_ms, **facts | facts_of.get(op, {}))
            found.num_samples = num
            yield found
    scores_in = "" if work.scores_at is None else work.scores_at.outer_function
    for rows in _by_function(work.lines):
        handed, again, forward = (
            sum(getattr(row, name) for row in rows)
            for name in ("handed_bytes", "handed_again_bytes", "forward_bytes")
        )
        handed -= again if is_repeated else 0.0  # a loss of its own, and where it goes that goes with it
        if handed < LARGE_BYTES or rows[0].at.outer_function == scores_in:
            continue
        num_bytes = handed * sum(row.bytes for row in rows) / forward
        lost_ms = part_ms(0.0, num_bytes)
        if not account.on_device:  # as much as samples show
            part = handed / (forward + sum(row.forward_flops for row in rows) / FLOPS_PER_BYTE)
            pages = new_pages(judged)  # a loss of its own
            part *= 1 - (0.0 if pages is None else pages.part)
            lost_ms = lost_ms * min(
                part * seen(rows[0].at)[0] * num_bytes / handed / max(float(lost_ms.mean()), 1e-9), 1.0
            )
        what = "operators that hand their results to each other through memory"
        yield finding("handed", what, rows[0].at, lost_ms, handed_bytes=num_bytes)
    # What ends all rows alike is part of them, as the steps in which a network answers.
    if work.padding_columns < ALL_ALIKE * work.padding:
        is_column = work.padding_columns >= HALF * work.padding
        part = work.padding_columns if is_column else work.padding
        if is_column or part >= LARGE_PADDING:
            op = "padding" if is_column else "lengths"
            # Padding has targets that are ignored: what goes with these is no longer there.
            left_ms = positive(ms - ignored_ms)
            attends = _part_of_attention(judged, account, ms) if is_column else 0.0
            beyond = part * (1 - part)  # of the square of a length, more than of the length
            facts = {"fills": percent(work.padding), "attends": percent(attends) if attends else None}
            found = finding(op, "padding of batches", None, (part + attends * beyond) * left_ms, **facts)
            if is_column and work.attention and not account.on_device:  # samples show no backward pass of it
                found.more_ms = (1 - attends) * beyond * float(left_ms.mean())
            yield found
    if work.rows_bytes:
        yield from _unread_rows(judged, account, work, part_ms(0.0, work.rows_bytes), optimizer)


def _without_hoisted(loop: OperatorLoop, work: WorkOfStep) -> OperatorLoop:
    """The loop with fewer operators, by as many as compute weights in it."""
    left = 1 - min(work.hoisted_launched * sum(row.operators for row in work.lines) / loop.all_operators, 1.0)
    numbers = {name: round(left * getattr(loop, name)) for name in ("operators", "all_operators")}
    return msgspec.structs.replace(loop, **numbers)


def _part_of_weights(judged: Run, at: StackFrame) -> tuple[float, int]:
    """Part of a line's samples whose thread is in what torch computes a weight with, and how many are."""
    stacks = [
        stack
        for one in samples_of_ranks(judged.whole)
        for stack in one.chosen(one.is_judged)
        if at in stack.frames
    ]
    of_weights = [stack.ms for stack in stacks if OF_WEIGHTS.match(stack.frames[-1].function)]
    return sum(of_weights) / max(sum(stack.ms for stack in stacks), 1e-9), len(of_weights)


class NewPages(NamedTuple):
    """Of the threads that train, means over recorded steps and ranks."""

    faults: float
    ms: float
    """In the system for them. All threads of an operator write its result, each its part: that is what the
    step takes longer."""
    part: float
    """Of a step, without what others take of the thread's core meanwhile."""
    ticks: float
    """Of the system's clock, by which it tells its own time, that show it."""


@once_of_run
def new_pages(judged: Run) -> NewPages | None:
    """None where nobody counted, or saw any."""
    whole = judged.whole
    if not {FAULTS, SYSTEM, READY} <= whole.host_parts.keys():
        return None
    columns = [whole.host_parts[name][:, whole.judged_steps] for name in (FAULTS, SYSTEM, READY)]
    columns.append(whole.values("step_ms"))
    is_known = np.isfinite(sum(columns))
    if is_known.sum() < FEWEST_OF_FAULTS:
        return None
    faults, system_ms, ready_ms, step_ms = (float(values[is_known].mean()) for values in columns)
    ms = min(system_ms, MOST_OF_A_FAULT_MS * faults)
    part = min(ms / max(step_ms - ready_ms, 1e-9), 1.0)
    return NewPages(faults, ms, part, ms * is_known.sum() / TICK_MS) if part > 0 else None


def pages_beside_rows(judged: Run, account: Account) -> NewPages | None:
    """Those of a CPU, but where gradients of tables may take them all, whose loss has them."""
    pages = None if account.on_device else new_pages(judged)
    work = judged.noted.work or WorkOfStep()
    return None if pages is None or work.rows_bytes >= pages.faults * PAGE_BYTES else pages


def _pages(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What operators on a CPU wait for memory for their results: the same part of the step and of what it
    computes. None where the other parts of a step may hold half of it, such as batches that are loaded, or
    arrays that the program makes beside its model."""
    pages, work = pages_beside_rows(judged, account), judged.noted.work or WorkOfStep()
    if pages is None:
        return
    ms, takes = beside_others(account, work_ms_of(account))
    lost_ms, others_ms = pages.part * float(ms.mean()), account.mean_step_ms - float(ms.mean())
    others_ms += sum(row.ms for row in phases_of(judged) if row.phase == "rest")
    sure_ms = min(pages.part * account.mean_step_ms - others_ms, lost_ms)
    if sure_ms < HALF * lost_ms:
        return
    most = max(work.lines, key=lambda line: line.forward_bytes, default=None)
    at = work.model_at if most is None else most.at
    found = finding_of("pages", "new pages of memory for results of operators", at, pages.part * ms, takes)
    found.facts |= {"num_pages": f"{pages.faults:,.0f}", "pages_ms": pages.ms}
    found.facts["least_part"] = HALF * sure_ms / lost_ms
    found.more_ms, found.size_error = HALF * lost_ms, OF_SAMPLES / math.sqrt(pages.ticks)
    yield found


def _zeroed(judged: Run, account: Account, work: WorkOfStep) -> Iterator[CauseFinding]:
    """What it takes to set gradients to zero and add to them, on a CPU."""
    if account.on_device or work.zeroed_bytes < LARGE_BYTES:
        return
    threads, work_ms = num_threads(judged.noted), float(work_ms_of(account).mean())
    rates = FROM_CACHES_BYTES_PER_S * threads, CPU_BYTES_PER_S * threads
    limits_ms = (min(1e3 * PASSES_OF_ZEROS * work.zeroed_bytes / rate, work_ms) for rate in rates)
    what = "gradients that are set to zero and added to"
    found = finding_within(
        account, *limits_ms, op="zeroed", what=what, at=None, zeroed_bytes=work.zeroed_bytes
    )
    found.evidence.append(
        "gradients that are new in each step take new pages, which some virtual machines give slowly"
    )
    yield found


def _part_of_attention(judged: Run, account: Account, work_ms: Floats) -> float:
    """Of the model's time, what attention takes, whose scores are as many as the square of the length: by
    kernels; on a CPU by samples of forward passes, and as much of the backward passes."""
    if account.on_device:
        return min(float(time_of_class(judged, "attention").mean() / max(work_ms.mean(), 1e-9)), 1.0)
    parts = []
    for one in samples_of_ranks(judged.whole):
        forward = one.is_judged & one.in_phase("forward")
        attends = forward & one.leaf_is(lambda leaf: bool(ATTENDS.search(leaf.function)))
        parts.append(float(one.ms[attends].sum() / max(one.ms[forward].sum(), 1e-9)))
    return min(parts, default=0.0)


def _reads_gradients(judged: Run) -> bool:
    """Whether the program may, by its source: it names .grad, or a pass that needs such inputs."""
    pieces = pieces_of_run(judged)
    return not pieces or any(READS_GRADIENTS.search(one.text) for one in pieces)


def _calls_of_few_rows(judged: Run, account: Account, work: WorkOfStep) -> Iterator[CauseFinding]:
    """What calls of a model on a few rows each take beyond one call on all: of each operator what it takes
    whatever its rows, and to go through the weights. Both are known within limits."""
    calls = work.calls
    if calls is None or calls.num < MANY_CALLS or account.on_device:
        return
    moved_bytes = PASSES_OF_WEIGHTS * calls.parameter_bytes / num_threads(judged.noted)
    beyond = calls.num - 1
    least_ms = beyond * (OF_A_CALL_MS * calls.operators + 1e3 * moved_bytes / FROM_CACHES_BYTES_PER_S)
    most_ms = beyond * (AT_MOST_MS * calls.operators + 1e3 * moved_bytes / CPU_BYTES_PER_S)
    most_ms = min(most_ms, beyond / calls.num * float(work_ms_of(account).mean()))
    if (least_ms := min(least_ms, most_ms)) > 0:
        what = f"{calls.num} calls of the model a step, on {counted(calls.rows, 'row')} each"
        found = finding_within(
            account, least_ms, most_ms, op="calls", what=what, at=calls.at, num_calls=calls.num
        )
        found.facts["operators_each"] = f"{calls.operators:,}"
        found.facts["each_bytes"] = float(calls.parameter_bytes)
        yield found


def _see_launches_and_solves(found: CauseFinding, judged: Run, account: Account, work: WorkOfStep) -> None:
    """Beside FLOPs and bytes: the part of the kernels of linear algebra, and of what a device idles for its
    host, by operators."""
    names = [name for name in operations(judged.metrics, NAME_TIME) if SOLVES.search(name)]
    solves_ms = work.hoisted_solves * time_of(judged, names)
    part = work.hoisted_launched
    # A host that would be ahead is not, behind each solve whose error code it has read.
    reads = work.hoisted_checks > part and account.share("launch") < MOSTLY_IDLE
    found.ms = found.ms + solves_ms
    _see_launches(found, account, work, part, work.hoisted_checks if reads else None)
    found.facts["solves_ms"] = float(np.mean(solves_ms)) or None
    if found.facts["solves_ms"]:
        found.facts["part"] = None  # their FLOPs are not in it


def _see_launches(
    found: CauseFinding, account: Account, work: WorkOfStep, part: float, checks: float | None = None
) -> None:
    """Beside what a device computes: the part of what it idles for its host, by operators, or by error codes
    that this reads."""
    launch_ms = (part if checks is None else checks) * account.mean_ms("launch")
    found.ms = found.ms + launch_ms
    of_launches = launch_ms / max(found.mean_ms, 1e-9)
    found.takes = {WORK: 1 - of_launches, ("launch",): of_launches}
    found.facts |= {
        "launched": part,
        "spared_ms" if checks is None else "checked_ms": launch_ms or None,
        "num_launched": round(part * sum(line.operators for line in work.lines)),
    }


def _by_function(lines: list[LineOfWork]) -> list[list[LineOfWork]]:
    """Those of each function together, the line with most bytes first."""
    found: dict[tuple[str, str], list[LineOfWork]] = {}
    for line in sorted(lines, key=lambda line: -line.handed_bytes):
        found.setdefault(line.at.function_id, []).append(line)
    return [*found.values()]


def loop_of(work: WorkOfStep) -> OperatorLoop | None:
    """With the lines that hold its operators: few rounds over parts in a function that is called often are
    noted where that is called."""
    loop = work.loop
    if loop is None or loop.kind != "parts":
        return loop
    for lines in _by_function(work.lines):
        large = [line for line in lines if line.operators >= LEAST * loop.all_operators]
        num, most = sum(line.operators for line in large), max(lines, key=lambda line: line.operators).at
        if most.outer_function != loop.at.outer_function and num >= NEARLY_ALL * loop.all_operators:
            numbers = [line.at.line for line in large]
            return msgspec.structs.replace(loop, at=most, first_line=min(numbers), last_line=max(numbers))
    return loop


def _is_unchanged(loop: OperatorLoop, work: WorkOfStep) -> bool:
    at, least = work.unchanged_at, (NEARLY_ALL * loop.flops, NEARLY_ALL * loop.bytes)
    is_there = at is not None and at.file == loop.at.file and loop.first_line <= at.line <= loop.last_line
    return is_there and work.unchanged >= least[0] and work.unchanged_bytes >= least[1]


def lines_text(loop: OperatorLoop) -> str:
    """'Experts.forward(), moe.py:23 to :27'"""
    text = msgspec.structs.replace(loop.at, line=loop.first_line).text
    return text if loop.first_line == loop.last_line else f"{text} to :{loop.last_line}"


def idle_cores(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What more threads would save where a step computes on a CPU, and cores that its process may use idle:
    a part of all but what operators need before their arithmetic."""
    work, modes = judged.noted.work, noted_modes(judged.noted)
    threads, cores = modes.get("num_threads"), modes.get("num_whole_cores")
    if account.on_device or work is None or not threads or not cores:
        return
    num_ranks, had, share = len(judged.ranks), cores_had(judged), account.share(*WORK)
    used, num_workers = num_ranks * threads, 0
    if had is None:
        rows = noted_program(judged.noted).get("loaders") or []
        num_workers = sum(row.get("num_workers") or 0 for row in rows if row.get("num_batches") != 0)
    else:  # of CPUs that a processor shows twice each may be on a core of its own
        used = max(used, had.ranks + had.others)
    enough = min(cores // num_ranks, threads + round((cores - used) / num_ranks))
    is_busy = used + num_ranks * num_workers > MOST_USED * cores or enough <= threads
    # Threads that have little to do are no fewer than the operators can use.
    are_idle = had is not None and had.helpers < HALF * (threads - 1) * share
    if is_busy or are_idle or account.share("core_taken") > LARGE or share < HALF:
        return
    of_torch = _part_of_torch(judged)
    if of_torch * share < HALF:
        return
    work_ms = of_torch * work_ms_of(account)
    usual_ms = np.median(work_ms)  # of what steps do now and then no operators are known
    work_ms = np.where(work_ms > MUCH_LONGER * usual_ms, usual_ms, work_ms)
    has_thread = any(one.that("locked_out").any() for one in samples_of_ranks(judged.whole))
    facts: dict[str, Any] = {
        "saves": "may, beside another thread of the process, save up to" if has_thread else "save",
        "is_alone": len(judged.ranks) == judged.noted.world_size == 1 and not has_thread,
        "threads": counted(threads, "thread"),
        "whole_cores": f"{cores}",
        "alone_on": f"{cores}" if had is None else None,
        "used_cores": None if had is None else number(had.ranks + had.others),
        "enough": f"{enough}",
        "omp_threads": judged.noted.environment.get("OMP_NUM_THREADS"),
    }
    if not work.flops:
        facts |= {"is_most": True, "not_known": "how much of a step are operators with little to compute"}
    ms = _by_threads(work, work_ms, 1 - used / cores)
    found = finding_of("threads", "cores that idle", noted_line(modes.get("threads_at")), ms, **facts)
    found.most_ms = (1 - used / cores) * float(work_ms.mean())  # as if all were divided among them
    yield found


def _part_of_torch(judged: Run) -> float:
    """Of what the thread runs in steps, as samples show, operators and passes of torch: its threads take no
    part in a loop of Python. All of it where too few tell."""
    torchs_ms = all_ms = 0.0
    num = 0
    for one in samples_of_ranks(judged.whole):
        runs = one.is_judged & one.that("runs") & ~one.in_phase("data", "checkpoint")
        is_torchs = one.leaf_is(is_of_torch) | one.in_phase("backward")
        torchs_ms += float(one.ms[runs & is_torchs].sum())
        all_ms += float(one.ms[runs].sum())
        num += int(runs.sum())
    return torchs_ms / all_ms if num >= FEWEST and all_ms > 0 else 1.0


def _by_threads(work: WorkOfStep, work_ms: Floats, part: float) -> Floats:
    """What threads on that part of the cores save, of all but what operators need before their arithmetic."""
    operators_ms = SMALL_CALL_MS * sum(line.operators for line in work.lines)
    return THREADS_SAVE * part * max(1 - operators_ms / float(work_ms.mean()), 0.0) * work_ms


def bound_cores(judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What is saved at most by the cores that a process, and not what started it, is bound away from: of one
    process on a CPU by threads on them; beside a device, where threads that launch wait for a core, all that
    the device waits for them and ranks for each other."""
    record, modes = judged.noted, noted_modes(judged.noted)
    cores, around = modes.get("num_cores") or 0, modes.get("num_cores_around") or 0
    at, num_ranks = modes.get("bound_at"), modes.get("num_local_ranks") or 1
    if not 0 < cores <= MOST_USED * around / num_ranks:
        return
    facts: dict[str, object] = {
        "op": "bound",
        "what": f"{counted(around - cores, 'core')} that the process is bound away from",
        "at": noted_line(at),
        "around": f"{around}",
        "bound_to": f"{cores}",
        "is_most": True,
    }
    if account.on_device:
        if at is not None and (taken := account.share("core_taken")) >= WORTH_SAYING:
            facts |= {"origin": "beside_device", "for_each": f"{around // num_ranks}"}
            facts |= {"taken_ms": taken * account.mean_step_ms, "not_known": "how far the host is ahead then"}
            held_up = np.sum(
                [account.cells[name].mean(axis=0) for name in HELD_UP if name in account.cells], axis=0
            )
            yield CauseFinding("compute", held_up, {HELD_UP: 1.0}, facts=facts)
        return
    if record.work is None or record.world_size > 1:
        return
    ms = _by_threads(record.work, _part_of_torch(judged) * work_ms_of(account), 1 - cores / around)
    facts["not_known"] = "what others use of these cores"
    yield CauseFinding("compute", ms, TAKES, facts=facts)


def _unread_rows(
    judged: Run, account: Account, work: WorkOfStep, written_ms: Floats, optimizer_ms: Floats
) -> Iterator[CauseFinding]:
    """Their gradient is written, to memory that is new to the process on a CPU, and the optimizer goes
    through it."""
    part = part_of_optimizers(judged.noted, work.rows_bytes)
    facts: dict[str, object] = {
        "op": "rows",
        "what": "gradients of rows that are not looked up",
        "at": work.rows_at,
        "rows_bytes": work.rows_bytes,
    }
    if account.on_device:
        ms = np.maximum(written_ms, _of_lookups(judged, work.rows_bytes)) + part * optimizer_ms
        facts["optimizer_ms"] = float(part * optimizer_ms.mean())
        yield CauseFinding("compute", ms, TAKES, facts=facts)
        return
    updated = account.cells.get("optimizer", np.zeros_like(account.step_ms)).mean(axis=0) * part
    updated_ms = float(updated.mean())
    # They are written in the backward pass.
    all_ms = judged.mean_of_host(f"{PREFIX}backward") or math.inf
    rates = (CPU_BYTES_PER_S, BUSY_CPU_BYTES_PER_S)
    least_ms, most_ms = (min(work.rows_bytes / rate * 1e3, all_ms) for rate in rates)
    facts |= {"optimizer_ms": updated_ms, "rows_part": part}
    if work.rows_looked_up is None:
        of_optimizer = updated_ms / (least_ms + updated_ms)
        takes: dict[tuple[str, ...], float] = {WORK: 1 - of_optimizer, ("optimizer",): of_optimizer}
        evidence = ["what new pages cost the system is not in it"]
        facts["unbounded"] = "what sparse updates take was not counted"
        yield CauseFinding("compute", least_ms + updated, takes, facts=facts, evidence=evidence)
        return
    sparse_most_ms = _sparse_ms(work)
    sparse_least_ms = SPARSE_LEAST * sparse_most_ms
    sparse_ms = math.sqrt(sparse_least_ms * sparse_most_ms)
    fused_ms = FUSED_SAVES * updated_ms if "unfused" in program_of(judged.noted)[0] else 0.0
    sure_ms = least_ms + updated_ms - sparse_most_ms
    filled_ms = math.sqrt(least_ms * most_ms)
    middle_ms = filled_ms + updated_ms - sparse_ms
    lost_ms = max(middle_ms, fused_ms, sure_ms)
    if max(sure_ms, fused_ms) <= 0:  # as many are looked up as may take longer than all rows
        return
    facts |= {
        "origin": "many_rows" if sure_ms < fused_ms else None,
        "least_part": max(sure_ms, fused_ms) / lost_ms,
        "written_ms": least_ms,
        "written_most_ms": most_ms,
        "sparse_ms": sparse_least_ms,
        "sparse_most_ms": sparse_most_ms,
        "rest_ms": 0.0,  # the rest of the optimizer is of other parameters
    }
    of_optimizer = min(max(updated_ms - sparse_ms, fused_ms) / lost_ms, 1.0)
    takes = {WORK: 1 - of_optimizer, ("optimizer",): of_optimizer}
    found = CauseFinding("compute", positive(lost_ms + updated - updated_ms), takes, facts=facts)
    # Writing has nothing to do with how many rows differ: hardly both are at their ends.
    beyond_ms = math.hypot(most_ms - filled_ms, sparse_ms - sparse_least_ms)
    found.more_ms = max(middle_ms + beyond_ms - lost_ms, 0.0)
    yield found


def _sparse_ms(work: WorkOfStep) -> float:
    """What sparse gradients and their update take on a CPU, at most."""
    return SPARSE_MS + SPARSE_ROW_MS * (work.rows_looked_up or 0) + SPARSE_BYTE_MS * work.rows_looked_up_bytes


def _of_lookups(judged: Run, rows_bytes: float) -> Floats:
    """[step], what kernels take that fill a table's gradient once for each lookup of a step, as many as these
    have time for, and add up what there is of several: two are read, and one is written."""
    names, part = operations(judged.metrics, NAME_TIME), part_of_device(judged)
    fills, adds = ([name for name in names if of.search(name)] for of in (ZEROS, ADDS))
    if fills and adds and part is not None:
        fills_ms = time_of(judged, fills)
        num = int(fills_ms.mean() * 1e-3 * part.memory.hbm_bytes_per_s / rows_bytes)
        if num > 1:
            return fills_ms + np.minimum(time_of(judged, adds), 3 * (num - 1) / num * fills_ms)
    return np.zeros(1)
