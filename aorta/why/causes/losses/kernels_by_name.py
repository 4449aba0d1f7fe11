"""What a device computes that training may do without, as names of its longest kernels tell it: in wide
types, in another layout, by slow algorithms; and what kernels of a name or a class take."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from aorta.account.judge.cells import Account
from aorta.account.load.measures import memory_limit_bytes, noted_modes, noted_program
from aorta.account.load.rank.kernels import NAME_COUNT, NAME_TIME, TIME
from aorta.account.metrics import of_operation, operations
from aorta.account.model import Run
from aorta.account.numbers import counted, percent
from aorta.account.rows import positive
from aorta.records.schema import WorkOfStep
from aorta.records.stacks import StackFrame
from aorta.timeline.arrays import Floats
from aorta.traces.classify import COMM_RULES, classifier, kernel_class
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.losses.parts import (
    WORK,
    beside_others,
    part_of_device,
    work_ms_of,
)
from aorta.why.causes.program import noted_line
from aorta.why.causes.source import pieces_of_run

TAKES: dict[tuple[str, ...], float] = {WORK: 1.0}
PRODUCTS = ("gemm", "attention")
"""Classes of kernels that take as long as their FLOPs; others take as long as their bytes."""
THROUGH_MEMORY = ("elementwise", "copy", "normalization")
"""Classes of kernels that take as long as their bytes, and of which compiled code has fewer."""
LARGE = 0.1
"""Of products in a wide type, that others must take for these to be the exception."""
FULL = re.compile(r"f32f32_f32f32_f32|(?<!fp16_)(?<!bf16_)sgemm|scudnn")
"""In names of kernels that multiply matrices in fp32 without tensor cores."""
CONVOLUTION = re.compile(r"[fdw](prop|grad)|conv")
INDEXED = re.compile(r"^indexing_backward_kernel")
"""Kernels of the backward pass of table[index], which add the rows of equal indices one after the other."""
SORTS = re.compile(r"(Radix|Merge)Sort")
"""Kernels of cub and thrust, which bring the indices of such sums into their order."""
ONE_BY_ONE = 5
"""From which on such a kernel waits, as a multiple of what it takes to move its bytes."""
IN_PARTS = re.compile(r"\b(interpolate|Upsampl\w*|ReplicationPad\w*)\(|mode=.replicate")
"""What deterministic algorithms compute with operators of indices, products and sums."""
NOT_ALL = (
    "it is what these kernels take, and others in their place would take some of it; what elementwise"
    " operators of interpolate() with deterministic algorithms take longer is not in it"
)
PRIME_TRANSFORM = re.compile(r"bluestein|prime_fft")
"""Kernels of transforms by large primes, of cuFFT and rocFFT."""
PRIMES_SAVE, PRIMES_SAVE_ON_CPU = (0.75, 1.2), (0.5, 0.91)
"""Of those kernels' time on an H200, beside which others go too, and of all such transforms in one thread,
that lengths of small primes save: of 13 lengths of 202 to 201,800, and of 22 of 1,021 to 103,424, two rows
and more; of a single long one 0.3 to 0.9."""
MULTIPLE, SMALL_PRIMES = 16, (2, 3, 5)
FP64 = re.compile(r"f64f64|dgemm|d884|double\)$")
"""In names of kernels for people."""
LOWER_PRECISION = re.compile(
    r"b?f16|fp16|e4m3|e5m2|hgemm|h(884|1688|16816)|nvjet_(sm\d+_)?[htqr]", re.IGNORECASE
)
"""The same in bf16, fp16 or fp8; nvjet of cuBLAS has a letter for each type of its operands, s of fp32."""
AS_FAST = 1 / 8
"""Of the time of a product in fp32, that TF32 or bf16 take on A100 (1/8 and less) and later GPUs."""
FP64_MORE = 0.5
"""Of the time of a kernel in fp64: fp32 has half its bytes, and twice its rate or more on CPUs and GPUs."""
LAYOUT_COPY = re.compile(r"^elementwise_kernel(_manual_unroll)? \(direct_copy")
"""Copies between tensors of unlike strides, by their names for people: ATen has kernels of other names for
those of like strides, which change the type."""
ZEROS, ADDS = re.compile(r"FillFunctor"), re.compile(r"CUDAFunctor_add")
"""Kernels that fill the gradient of a table for each lookup, and add it to that of the one before."""
COLUMNS = re.compile(r"(im2|vol2|2)col|col2(im|vol)")
COLUMNS_SAVE = 0.7
"""Of the products of one image after the other beside such copies, that cuDNN does not take: 5.2 ms for 18.4
on an H200."""
CUDNN_COPY = re.compile(r"nchwToNhwc|nhwcToNchw", re.IGNORECASE)
"""Kernels that cuDNN puts around a convolution for tensor cores, which want channels last."""
NCHW = re.compile(r"nchw", re.IGNORECASE)
TRANSFORM = "batch_norm_transform_input_kernel"
PASSES = {TRANSFORM: 2, "batch_norm_collect_statistics_kernel": 1, "batch_norm_backward_kernel": 5}
"""Of ATen's BatchNorm in NCHW, by its kernels' names for people: how often one reads or writes what is
normalized. The first is bound by memory; of the others what takes longer is lost to strides."""
STRIDED = re.compile(r"^elementwise_kernel(_manual_unroll)? ")
"""Kernels on tensors of unlike strides, or that are repeated along some."""
NHWC, PUT_BACK, MOST_PUT_BACK = re.compile(r"nhwc", re.IGNORECASE), 2, 6
"""Convolutions in channels last; copies for each that a line asks for, from which on others put back, and of
which they do at most: gates in a planted network have 4 in both passes, which take 6.4 of the 7.4 ms lost."""
OF_PLANES, OF_LINES = re.compile(r"[Cc]onv\w*[23]d|torchvision|timm"), re.compile(r"[Cc]onv\w*1d")
HALF, NEARLY_ALL = 0.5, 0.9
ODD = re.compile(r"^(?!.*(?:simt|[fdw](?:prop|grad))).*_align([12])\b")
"""In names of kernels for tensor cores: elements at whose multiples rows begin."""
TWO_BYTES = re.compile(r"bf16|f16|h(884|1688|16816)")
SLOWER = {"1": 6.3, "2": 3.0, "tf32": 2.4}
"""Times as long as kernels for rows of the next multiple of 64 that they take, on H200: of types of two bytes
by what is aligned, and of TF32."""
ODD_RATE = 0.5
"""Of the rate of the step's other products, below which products are slow for the length of their rows."""
LEAST = 0.05
"""Of a step."""
COPIES = "copies into another layout"


def of_kernels(judged: Run, account: Account, work: WorkOfStep) -> Iterator[CauseFinding]:
    """Of a device; of Fourier transforms on a CPU what was timed."""
    names = operations(judged.metrics, NAME_TIME) if account.on_device else []
    yield from _wide_kernels(judged, names, work)
    of_cudnn = [name for name in names if CUDNN_COPY.search(name)]
    if of_cudnn and _has_planes(judged):
        ms = time_of(judged, of_cudnn)
        found = finding_of("channels", "convolutions in NCHW", work.model_at, ms, layout_ms=float(ms.mean()))
        of_norm = [name for name in PASSES if name in names]
        if TRANSFORM in of_norm:
            pass_ms = time_of(judged, [TRANSFORM]) / PASSES[TRANSFORM]
            norm_ms = sum(positive(time_of(judged, [name]) - PASSES[name] * pass_ms) for name in of_norm)
            found.ms, found.facts["norm_ms"] = ms + norm_ms, float(np.mean(norm_ms))
        others = [name for name in names if NCHW.search(name) and name not in of_cudnn]
        found.more_ms = float(time_of(judged, others).mean())
        yield found
    yield from _layout_copies(judged, names, work)
    yield from _odd_products(judged, names, work)
    yield from _prime_transforms(judged, account, names, work)
    if columns := [name for name in names if COLUMNS.search(name)]:
        ms = time_of(judged, columns)
        both_ms = ms + np.minimum(COLUMNS_SAVE * time_of_class(judged, "gemm"), ms)
        found = finding_of("columns", "inputs of convolutions copied into columns", None, both_ms)
        found.facts |= {"columns_ms": float(ms.mean()), "kernel": columns[0]}
        yield found
    slowed_by = noted_modes(judged.noted).get("slowed_by") or {}
    if account.on_device and "deterministic" in slowed_by:
        yield from _deterministic(judged, account, names, slowed_by, work)
    if (indexing := [name for name in names if INDEXED.search(name)]) and "deterministic" not in slowed_by:
        yield from _one_after_the_other(judged, indexing, work)


def _has_planes(judged: Run) -> bool:
    """Not where all convolutions that the source names go through rows: these have no channels last."""
    texts = [one.text for one in pieces_of_run(judged)]
    return any(map(OF_PLANES.search, texts)) or not any(map(OF_LINES.search, texts))


def _layout_copies(judged: Run, names: list[str], work: WorkOfStep) -> Iterator[CauseFinding]:
    """Those that lines of the program ask for, of the kernels that make them and what others ask for. Where
    convolutions want channels last, the others put back what these lines have changed, in both passes."""
    copies = [name for name in names if LAYOUT_COPY.search(name)]
    num = sum(_count_of(judged, name) for name in copies)
    if not work.copies or not num:
        return
    all_ms = time_of(judged, copies)
    ms = all_ms * min(work.copies / num, 1.0)
    found = finding_of(
        "layout", COPIES, work.copies_at, ms, num_copies=work.copies, layout_ms=float(ms.mean())
    )
    if num >= PUT_BACK * work.copies and any(NHWC.search(name) for name in names):
        found.ms = all_ms * min(MOST_PUT_BACK * work.copies / num, 1.0)
        strided_ms = time_of(judged, [name for name in names if STRIDED.search(name) and name not in copies])
        found.more_ms = float(all_ms.mean() - found.ms.mean() + strided_ms.mean())
        found.facts |= {
            "least_part": float(ms.mean() / found.ms.mean()),
            "all_copies_ms": float(all_ms.mean()),
        }
        found.facts["num_all_copies"] = f"{num:,.0f}"
    yield found


def _prime_transforms(
    judged: Run, account: Account, names: list[str], work: WorkOfStep
) -> Iterator[CauseFinding]:
    """What Fourier transforms of lengths with a large prime factor take beyond those of the next length
    without: on a device by their kernels."""
    noted = work.transforms
    facts: dict[str, Any] = {"op": "transforms", "what": "Fourier transforms by a large prime", "at": None}
    if noted is not None:
        facts["at"], facts["length"] = noted.at, f"{noted.length:,}"
        facts["what"] = f"{counted(noted.num, 'Fourier transform')} of length {noted.length:,}"
        facts |= {"prime": f"{noted.prime:,}", "good_length": f"{_good_length(noted.length):,}"}
    if account.on_device:
        told = [name for name in names if PRIME_TRANSFORM.search(name)]
        ms, kernel = float(time_of(judged, told).mean()), next(iter(told), None)
        least_ms, most_ms = (part * ms for part in PRIMES_SAVE)
        facts |= {"transform_kernel": kernel, "kernels_ms": ms}
    else:
        ms = 0.0 if noted is None or noted.ms is None else (1 + noted.with_gradient) * noted.ms
        least_ms, most_ms = (part * min(ms, float(work_ms_of(account).mean())) for part in PRIMES_SAVE_ON_CPU)
        facts["transforms_ms"] = ms
    if least_ms > 0:
        yield finding_within(account, least_ms, most_ms, **facts)


def _good_length(length: int) -> int:
    """The next one that small primes alone divide, and MULTIPLE, where that is no great part of it."""
    multiple = MULTIPLE if length >= MULTIPLE**2 else 1
    found = -(-length // multiple) * multiple
    while not _is_good(found):
        found += multiple
    return found


def _is_good(length: int) -> bool:
    for prime in SMALL_PRIMES:
        while length % prime == 0:
            length //= prime
    return length == 1


def _odd_products(judged: Run, names: list[str], work: WorkOfStep) -> Iterator[CauseFinding]:
    """What kernels for rows that begin anywhere take, by their names, beyond others for such products; or
    those of the largest products, beyond the rate of the step's others."""
    align_of = {name: by[1] for name in names if (by := ODD.search(name)) is not None}
    told, at = [*align_of], None
    shape = odd_shape_of(judged, any(map(TWO_BYTES.search, told)))
    length, num = 0 if shape is None else shape[0], sum(_count_of(judged, name) for name in told)
    if work.odd_num:
        length, num, at = work.odd_length, float(work.odd_num), work.odd_at or work.model_at
        told = told or _of_largest(judged, names, work.odd_num)
    if not told:
        return
    took = {name: time_of(judged, [name]) for name in told}
    ms: Floats = np.sum([*took.values()], axis=0)
    slower = 0.0
    if align_of:
        kinds = {name: align_of[name] if TWO_BYTES.search(name) else "tf32" for name in told}
        slower = float(ms.mean()) / sum(float(took[name].mean()) / SLOWER[kinds[name]] for name in told)
    elif work.flops > work.odd:
        all_ms = float(sum(time_of_class(judged, name) for name in PRODUCTS).mean())  # type: ignore[union-attr]
        rate = (work.flops - work.odd) / max(all_ms - float(ms.mean()), 1e-9)
        slower = rate * float(ms.mean()) / work.odd
    kernel = max(align_of, key=lambda name: float(took[name].mean()), default="")
    rows = f"of {length:,} elements" if length else "that begin anywhere"
    if slower > 1 / ODD_RATE:
        facts: dict[str, Any] = {
            "odd_ms": float(ms.mean()),
            "slower": f"{slower:.1f}",
            "odd_kernel": kernel.partition("(")[2].rstrip(")") or kernel or None,
            "length": f"{length:,}" if length else None,
            "padded": f"{-(-length // 64) * 64:,}",
            "shape": None if shape is None else " x ".join(f"{size:,}" for size in shape[1]),
        }
        yield finding_of("odd", f"{num:,.0f} products with rows {rows}", at, (1 - 1 / slower) * ms, **facts)


def odd_shape_of(judged: Run, has_two_bytes: bool) -> tuple[int, list[int]] | None:
    """The largest matrix that is trained of those whose rows do not begin at multiples of 16 bytes, and its
    dimension that does not; None where nobody noted it, and of one too small to take long."""
    aligned = 8 if has_two_bytes else 4
    for row in noted_program(judged.noted).get("optimizers") or []:
        shape, num_bytes = row.get("odd_shape") or [], row.get("parameter_bytes") or 0.0
        odd = [size for size in shape if size % aligned]
        if odd and math.prod(shape) >= LEAST * num_bytes / 4:
            return max(odd), shape
    return None


def _of_largest(judged: Run, names: list[str], odd_num: int) -> list[str]:
    """The longest kernels that multiply, as many as there are odd products: none where no names are just
    theirs."""
    products = [name for name in names if kernel_class(name) == "gemm"]
    each_ms = {
        name: float(time_of(judged, [name]).mean()) / max(_count_of(judged, name), 1e-9) for name in products
    }
    longest, num = list[str](), 0.0
    for name in sorted(products, key=lambda name: -each_ms[name]):
        if num + _count_of(judged, name) > odd_num + HALF:
            break
        longest, num = [*longest, name], num + _count_of(judged, name)
    return longest if num >= odd_num - HALF else []


def _wide_kernels(judged: Run, names: list[str], work: WorkOfStep) -> Iterator[CauseFinding]:
    """Products without tensor cores, or all in fp64, where others are in a lower precision."""
    own = [name for name in names if classifier(COMM_RULES).comm_op(name) is None]
    products = [name for name in own if kernel_class(name) == "gemm"]
    fp64, fp32 = ([name for name in all_ if of.search(name)] for all_, of in ((own, FP64), (products, FULL)))
    lower = [name for name in products if name not in fp32 and LOWER_PRECISION.search(name)]
    others = {"fp64": [name for name in own if name not in fp64], "fp32": lower}
    if fp32 and not lower and (as_fast := _tf32_as_fast(judged)):
        ms = time_of(judged, fp32)
        op, what = "all_fp32", "matrix products in fp32, all of them"
        convs = [name for name in fp32 if CONVOLUTION.search(name)]
        is_tf32 = any("tf32" in name for name in products)
        if convs and not is_tf32 and time_of(judged, convs).mean() >= HALF * ms.mean():
            op, what = "convs_fp32", "convolutions in fp32"
        yield finding_of(op, what, work.model_at, (1 - as_fast) * ms, all_ms=float(ms.mean()))
    for op, wide, less in (("fp64", fp64, FP64_MORE), ("fp32", fp32, 1 - AS_FAST)):
        if not wide or not (others[op] or op == "fp64"):
            continue
        ms = time_of(judged, wide)
        others_ms = float(time_of(judged, others[op]).mean())
        if others_ms < LARGE * ms.mean():
            if op == "fp64":
                yield all_in_fp64(judged, work, ms, TAKES)
            continue
        what, at = f"{'work' if op == 'fp64' else 'matrix products'} in {op}", getattr(work, f"{op}_at")
        found = finding_of(op, what, at, less * ms, wide_ms=float(ms.mean()), others_ms=others_ms)
        longest = max(wide, key=lambda name: time_of(judged, [name]).mean())
        found.facts["kernel"] = longest.partition("_tilesize")[0]
        yield found


def all_in_fp64(
    judged: Run, work: WorkOfStep, ms: Floats, takes: dict[tuple[str, ...], float]
) -> CauseFinding:
    """Of ms, which are all of such work."""
    at, of_all_ms = work.fp64_at or work.model_at, float(ms.mean())
    found = finding_of("all_fp64", "a network in fp64", at, FP64_MORE * ms, takes, fp64_ms=of_all_ms)
    found.facts["tf32"] = "torch.set_float32_matmul_precision('high')" if _tf32_as_fast(judged) else None
    return found


def _tf32_as_fast(judged: Run) -> float:
    """Part of the time that products in fp32 take as TF32, by the device's data sheet; 0 where the program
    allows that, or the device has no such units."""
    modes, part = noted_modes(judged.noted), part_of_device(judged)
    if part is None or modes.get("float32_matmul_precision") != "highest":
        return 0.0
    rates = part.compute.peak_flops
    return rates["fp32"] / rates["tf32"] if {"fp32", "tf32"} <= set(rates) else 0.0


def _deterministic(
    judged: Run,
    account: Account,
    names: list[str],
    slowed_by: dict[str, tuple[str, int] | None],
    work: WorkOfStep,
) -> Iterator[CauseFinding]:
    """What kernels that sum in a fixed order, and those that fill new memory, take: at most that is saved, as
    others take their place. Of the first, which table[index] has anyway, their part by bytes. Of what
    interpolates no record tells which of the small ones are its own. cuDNN 9 has convolutions of both sorts
    that take the same time: ResNet-50's on an H200."""
    facts: dict[str, Any] = {}
    in_order = [name for name in names if INDEXED.search(name) or SORTS.search(name)]
    fills = [name for name in names if "filled" in slowed_by and ZEROS.search(name)]
    ms, filled_ms = time_of(judged, in_order), time_of(judged, fills)
    if work.ordered_bytes + work.indexed_bytes:
        ms = ms * (part := work.ordered_bytes / (work.ordered_bytes + work.indexed_bytes))
        facts["ordered_part"] = percent(part) if part < 1 else None
        facts["ordered_line"] = None if work.ordered_at is None else work.ordered_at.text
    facts |= {"ordered_ms": float(ms.mean()) or None, "ordered_kernel": next(iter(in_order), None)}
    ms, facts["filled_ms"] = ms + filled_ms, float(filled_ms.mean()) or None
    if ms.mean() >= LARGE * account.mean_step_ms:
        facts |= {"is_most": True, "not_known": "what other kernels take in their place"}
        is_more = any(IN_PARTS.search(one.text) for one in pieces_of_run(judged))
        if is_more:
            facts |= {"is_most": False, "unbounded": "what all kernels take without them is not known"}
        at = noted_line(slowed_by["deterministic"])
        found = finding_of("deterministic", "deterministic algorithms", at, ms, **facts)
        found.evidence = [NOT_ALL] if is_more else []
        yield found


def _one_after_the_other(judged: Run, names: list[str], work: WorkOfStep) -> Iterator[CauseFinding]:
    """Where a kernel takes longer than to read and write all that is allocated, twice, it waits for sums: of
    different indices it would be done. Of wide rows the bytes tell more, where they were counted: on an H200
    it took 0.6 to 2.4 times what four times these take with different indices, or each up to 64 times, and 4
    to 255 times with 24 rows for all (64 to 2,048 numbers a row); of narrow rows up to 136 times with any."""
    used, hardware = memory_used(judged), part_of_device(judged)
    if hardware is None:
        return
    ms_of_byte = 4e3 / hardware.memory.sustained_hbm_bytes_per_s
    wide = [name for name in names if "stride" not in name]
    ms, least_ms = time_of(judged, wide), ONE_BY_ONE * work.indexed_bytes * ms_of_byte
    moved = f"what it adds up could be read and written {2 * ONE_BY_ONE} times"
    if not ms.mean() >= least_ms > 0:
        ms, moved = time_of(judged, names), "all that is allocated could be read and written twice"
        num = sum(_count_of(judged, name) for name in names)
        least_ms = 0.0 if used is None else num * used.peak_bytes * ms_of_byte
    if ms.mean() >= least_ms > 0:
        found = finding_of("shared", "rows of a table that many indices share", work.indexed_at, ms)
        found.facts |= {"shared_ms": float(ms.mean()), "kernel_of_index": names[0], "moved": moved}
        yield found


class MemoryUsed(NamedTuple):
    peak_bytes: float
    limit_bytes: float


def memory_used(judged: Run) -> MemoryUsed | None:
    """The most that torch allocated on a rank, and the device's memory."""
    limit, peak = memory_limit_bytes(judged.noted), judged.metrics.get("peak_memory_bytes")
    if limit is None or peak is None or not np.isfinite(peak).any():
        return None
    return MemoryUsed(float(np.nanmax(peak)), float(limit))


def finding_of(
    op: str,
    what: str,
    at: StackFrame | None,
    ms: Floats,
    takes: dict[tuple[str, ...], float] = TAKES,
    **facts: object,
) -> CauseFinding:
    return CauseFinding("compute", ms, takes, {"op": op, "what": what, "at": at, **facts})


def finding_within(account: Account, least_ms: float, most_ms: float, **facts: Any) -> CauseFinding:
    """Of what ranks compute, what is known within limits: told is the middle, as of ratios."""
    work_ms, (ms, takes) = float(work_ms_of(account).mean()), (work_ms_of(account), TAKES)
    if not account.on_device:
        ms, takes = beside_others(account, ms)
    lost_ms = math.sqrt(least_ms * most_ms)
    found = finding_of(ms=lost_ms / work_ms * ms, takes=takes, least_part=least_ms / lost_ms, **facts)
    found.more_ms = (most_ms - lost_ms) / work_ms * float(ms.mean())
    return found


def _count_of(judged: Run, name: str) -> float:
    return judged.mean_of(of_operation(NAME_COUNT, name)) or 0.0


def beside_model_ms(judged: Run) -> float | None:
    """Of kernels that memory bounds, what the model's operators leave, at the rate of the device's memory;
    None where its bytes were not counted."""
    hardware, model_bytes = part_of_device(judged), (judged.noted.work or WorkOfStep()).bytes
    if hardware is None or not model_bytes:
        return None
    all_ms = sum(float(time_of_class(judged, name).mean()) for name in THROUGH_MEMORY)
    return all_ms - 1e3 * model_bytes / hardware.memory.sustained_hbm_bytes_per_s


def time_of_class(judged: Run, name: str) -> Floats:
    """[step], of a device's kernels, a mean over ranks."""
    return time_of(judged, [name] if of_operation(TIME, name) in judged.metrics else [], TIME)


def time_of(judged: Run, names: list[str], metric: str = NAME_TIME) -> Floats:
    """[step], of kernels of these names, a mean over ranks; one 0 of none."""
    values = [positive(judged.values(of_operation(metric, name))).mean(axis=0) for name in names]
    by_step: Floats = np.sum(values or [np.zeros(1)], axis=0)
    return by_step
