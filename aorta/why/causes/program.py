"""What a run uses, in names and facts that rules ask for: what the program has set, as run.json holds it, and
libraries, as far as records tell."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from aorta.account.cause import CodeLine
from aorta.account.judge.cores import CoresHad
from aorta.account.judge.stacks import MOST
from aorta.account.judge.workers import LoaderWork
from aorta.account.load.measures import noted_modes, noted_program, num_local_ranks, usable_cores
from aorta.account.load.rank.kernels import NAME_TIME
from aorta.account.metrics import operations
from aorta.account.model import Run
from aorta.account.numbers import byte_text, counted, quantity
from aorta.records.schema import RunRecord
from aorta.records.stacks import StackFrame
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.types import TRACE_SOURCES
from aorta.why.causes.source import gives_rows, pieces_of_run, source_of

PROGRAM = (
    *("workers_0", "workers", "workers_new", "pinned", "buckets_small", "no_buffers", "bucket_view"),
    *("blocks", "resharded_not", "reduced_narrow", "gathered_narrow", "foreach_off", "many_groups"),
    *("fused", "optimizer_of_another", "never_fused", "unfused", "anomaly", "no_core", "short_batch"),
    *("whole_batches", "cuda_graphs", "own_crowd", "one_thread", "few_threads", "comm_hook"),
    *("prefetched", "sliced"),
    *("expandable", "one_queue", "offloaded", "foreach", "buckets_usual", "iterated_anew", "own_threads"),
    *("items_on_device", "takes_sparse", "omp_thread", "rows", "dispatched", "own_sampler"),
)
"""workers_0: the training loop's DataLoader has none; workers_new: it has some, which start anew in short
epochs. pinned: it hands out pinned memory. buckets_small, buckets_usual: DDP's are set below its default, or
not. no_buffers: the model has none that DDP could send. bucket_view: gradient_as_bucket_view is set. blocks:
units of fully_shard hold several weights. resharded_not: no unit is resharded behind its forward pass.
reduced_narrow, gathered_narrow: its gradients, its weights move in 16 bits. foreach, foreach_off, fused: of
the optimizer with most parameters; foreach: neither of the others. many_groups: it has groups of a few
parameters each, most with the same options. optimizer_of_another: it is none of torch.optim. never_fused: it
has no such form, for units of fully_shard. unfused: all are of UNFUSED. anomaly: autograd's anomaly detection
is on. no_core: workers of a loader would take cores from training. short_batch: a worker would take as long
to hand a batch over as the step waits for it. whole_batches: the data set is asked for a batch at once.
cuda_graphs: torch.compile was asked to replay the model as CUDA graphs. own_crowd: the ranks of a machine
have more threads of torch and loader workers than cores; own_threads: as the program itself has set;
one_thread: the program has set torch to one; omp_thread: OMP_NUM_THREADS has; few_threads: it has one, and no
workers. sliced: each rank loads what all of them train on. comm_hook: DDP's gradients go through one.
prefetched: FullyShardedDataParallel gathers ahead in both passes. expandable: so are segments of the
allocator. one_queue: CUDA_DEVICE_MAX_CONNECTIONS is 1. offloaded: units keep their parameters on the CPU.
iterated_anew: each batch is of an iterator of its own. takes_sparse: the optimizer with most parameters is
one of torch.optim that updates rows of sparse gradients alone. rows: batches are rows of tensors, fetched one
by one. dispatched: accelerate lets one rank load the batches of all, in the line of the cause. own_sampler:
that line is of a sampler of the program."""
TAKE_SPARSE = ("Adagrad", "SGD")
OFFERS = {
    "fused": r"\bfused(?:=True| optimizer)",
    "pinned": r"\bpin_memory=True",
    "bucket_view": r"\bgradient_as_bucket_view=True",
    "resharded_not": r"\b(?:reshard_after_forward=False|SHARD_GRAD_OP)",
    "reduced_narrow": r"\bmp_policy with reduce_dtype|\bmixed_precision=",
    "gathered_narrow": r"\bmp_policy with param_dtype",
    "no_buffers": r"\b(?:broadcast|forward_sync)_buffers=False",
    "never_fused": r"\bfused(?:=True| optimizer)",
    "few_threads": r"\bfewer threads per rank",
    "comm_hook": r"\bcommunication hook|\bfp16_compress_hook",
    "buckets_usual": r"\bbucket_cap_mb=25\b",
    "prefetched": r"\bforward_prefetch=True",
    "expandable": r"\bexpandable_segments:True",
    "one_queue": r"^set CUDA_DEVICE_MAX_CONNECTIONS=1",
    "compile": r"\btorch\.compile(?:\(model\)| the function| of the loop)",
    "cuda_graphs": r"\bmode='reduce-overhead'",
    "blocks": r"\bfully_shard (?:each block|of whole)",
}
"""What a remedy offers, by the name that says it is set, or that there is no such thing."""
BLOCKING = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING")
BLOCKING_WAITS = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
"""Of torch, which takes words for 1 as well."""
HIDING = (*BLOCKING, "AMD_SERIALIZE_KERNEL", "PYTORCH_NO_CUDA_MEMORY_CACHING")
"""Variables that make the host wait: what else would help late launches, they hide."""
WORDS_FOR_1 = ("Y", "YES", "T", "TRUE")
COMPILES_NOT = ("TORCHDYNAMO_DISABLE=1", "TORCH_COMPILE_DISABLE=1")
"""Settings under which what is told of torch.compile does nothing, as settings of a rule."""
TORCH_OPTIMIZERS = frozenset(
    (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam"),
        *("RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
FUSED = frozenset(("Adagrad", "Adam", "AdamW", "SGD"))
"""Those of them that take fused=True; of fully_shard's parameters, which are DTensors, UNFUSED alone."""
UNFUSED = ("Adam", "AdamW")
"""Those that cross memory 20 times on a CPU without it and 7 times with it, which they take there since torch
2.4. SGD without momentum gains nothing; Adagrad may have sparse gradients, which no fused one takes."""
PARTS = re.compile(r"(; |, )(?![^()]*\))")
"""Between parts of a remedy, outside of brackets."""
NOTHING_LEFT = "what is known to help is in force"
HAND_OVER_MS = 1.0
"""CPU time of the process that trains to receive a batch of a worker: 0.5 to 2.8 ms for 4 kB to 13 MB."""
TAKES_ROWS = re.compile(r"(?:TensorDataset|Subset|_MapDatasetFetcher)\.\w+ of torch|\w*collate\w* of torch")
"""Functions of torch that fetch samples one by one and join them."""
CONVERTS_ROWS = re.compile(r"|torch\.(?:from_numpy|as_tensor|tensor|stack)")
ROW_MS = 0.05
"""Of a row of a few tensors that Python fetches and joins, at most: 5 to 26 us as measured. Of larger ones
that take longer, copies do."""
MOST_WORKERS, MOST_OF_ALL = 4, 16
"""Of a loader: mostly, and where batches take far longer than the rest of a step."""
MUCH_LEFT = 0.1
"""Of a wait, that workers leave."""
THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
CROWDED = 0.1
"""Part of the step in which others have the cores, from which on no core is free."""
LEAST_FREE = 0.25
"""Of a core, that a worker needs to be worth it."""
USUAL_BUCKET_MB = 25.0
SYNCED = re.compile(r"2\.(1[3-9]|[2-9]\d)|[3-9]\.")
"""Versions of torch that call DDP's broadcast_buffers forward_sync_buffers, and warn of the old name."""
WEIGHTS_OF_A_BLOCK = 4
UNIT_BYTES = 80 << 20
"""Of parameters, that are worth several units, of 10 MB each."""
FSDP1 = "FullyShardedDataParallel"
RESHARDED = ("FULL_SHARD", "HYBRID_SHARD")
STATE_OF_ADAM = 2
"""Times the bytes of the parameters; other optimizers keep less."""
LITTLE = 0.05
"""Of a rank's memory, for which no state need be sharded."""
FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element."""
WIDE_PART = 0.1
"""Norms in fp32 beside a model in bf16 are less."""
MANY_EPOCHS, ANEW = 3, 0.9
"""Of a loader, and iterators over batches: it is asked for one for each batch."""
SHORT_EPOCH = 200
"""Batches."""
MANY_GROUPS = 16
FEW_PARAMETERS = 4
"""Of a group, that an optimizer goes through at once: as many and fewer are no faster together than alone."""
FEWER_GROUPS = 0.25
"""Groups with options of their own over all groups, up to which putting like ones together is worth it."""


def without_in_force(change: str, names: frozenset[str]) -> str:
    """A remedy without the parts of it that the program has set.

    names: of PROGRAM and of the run's libraries.
    """
    if "in force" in change:
        return change
    offered = [pattern for name, pattern in OFFERS.items() if name in names]
    parts = PARTS.split(change)
    kept = [
        part + gap
        for part, gap in zip(parts[::2], [*parts[1::2], ""], strict=True)
        if not any(re.search(pattern, part) for pattern in offered)
    ]
    return "".join(kept).rstrip(",; ").removeprefix("or ") or NOTHING_LEFT


class SlowingSetting(NamedTuple):
    text: str
    """'NCCL_P2P_DISABLE=1'"""
    at: str
    """' (set in train.py:9)'; '' where no line of the program does."""
    effect: str


@cache
def effects_of_settings() -> dict[str, str]:
    from aorta.config.yaml_files import read_structs

    return read_structs(Path(__file__).with_name("settings.yaml"), dict[str, str])


def settings_in_force(settings: Iterable[str], judged: Run) -> list[SlowingSetting]:
    """Those of these, which are keys of settings.yaml, whose variable has the value."""
    environment, found = _environment(judged), []
    if judged.source == "host" or judged.noted.world_size < 2:
        environment = {name: value for name, value in environment.items() if "NCCL_" not in name}
    for setting in settings:
        name, _, value = setting.partition("=")
        is_set = environment.get(name, "").upper()
        if is_set == value or (name in BLOCKING_WAITS and is_set in WORDS_FOR_1):
            lines = [one.at.text for one in pieces_of_run(judged) if name in one.text]
            at = f" (set in {lines[0]})" if len({*lines}) == 1 else ""
            found.append(SlowingSetting(setting, at, effects_of_settings()[setting]))
    return found


def settings_text(settings: Iterable[str], judged: Run) -> str:
    """'leave NCCL_P2P_DISABLE=1 out of the environment (set in train.py:9), where ...; ' of those set;
    '' of none."""
    return "".join(
        f"leave {one.text} out of the environment{one.at}, where nothing needs it: {one.effect}; "
        for one in settings_in_force(settings, judged)
    )


def hides_all(settings: Iterable[str], judged: Run, names: Collection[str] = HIDING) -> bool:
    """Whether one of these variables is among those in force."""
    return any(one.text.partition("=")[0] in names for one in settings_in_force(settings, judged))


def blocks_launches(judged: Run) -> bool:
    """Whether each launch waits for its kernel."""
    return any(_environment(judged).get(name) == "1" for name in BLOCKING)


def _environment(judged: Run) -> Mapping[str, str]:
    return (judged.noted.variables or {}) | judged.noted.environment


def program_of(run: RunRecord) -> tuple[frozenset[str], dict[str, str]]:
    """Names of PROGRAM that hold, libraries that it is known to use, and texts for the sentences of rules.

    Nothing where nobody watched.
    """
    program = noted_program(run)
    names: set[str] = set()
    facts: dict[str, str] = {}
    loader = loader_of(program)
    if loader is not None:
        _loader(loader, names, facts)
        calls = None if run.work is None else run.work.calls
        rows = 0 if calls is None or calls.num != 1 or run.world_size < 2 else calls.rows
        if rows and loader.get("batch_size") == run.world_size * rows:
            names.add("sliced")
            facts |= {"loaded_rows": str(loader["batch_size"]), "own_rows": str(rows)}
    wrapper = _largest(program.get("wrappers"), "parameter_bytes")
    if wrapper is not None:
        _ddp(wrapper, names, facts)
        is_new = SYNCED.match(run.versions.get("torch") or "")
        facts["buffers_option"] = f"{'forward_sync' if is_new else 'broadcast'}_buffers"
    units = _rows(program.get("units"))
    if units:
        _units(units, names, facts)
    optimizer = _largest(program.get("optimizers"), "parameter_bytes")
    if optimizer is not None:
        names |= {"fused"} if optimizer.get("fused") else set()
        is_off = optimizer.get("foreach") is False and not optimizer.get("fused")
        names |= {"foreach_off"} if is_off else set()
        is_torchs = str(optimizer.get("kind")) in TORCH_OPTIMIZERS
        names |= {"foreach"} if is_torchs and not is_off and not optimizer.get("fused") else set()
        _groups(optimizer, names, facts)
        names |= set() if is_torchs or optimizer.get("fused") else {"optimizer_of_another"}
        all_rows = _rows(program.get("optimizers"))
        is_unfused = all(row.get("kind") in UNFUSED and not row.get("fused") for row in all_rows)
        names |= {"unfused"} if is_unfused else set()
        has_fused = UNFUSED if "fsdp2" in names else FUSED
        names |= {"never_fused"} if is_torchs and optimizer.get("kind") not in has_fused else set()
        names |= {"takes_sparse"} if optimizer.get("kind") in TAKE_SPARSE else set()
        facts |= _site("optimizer", optimizer)
        facts |= _of_optimizer(str(optimizer.get("kind")), optimizer.get("site"))
        facts |= _plain(optimizer, all_rows, run)
    modes = noted_modes(run)
    if modes.get("anomaly_detection"):
        names.add("anomaly")
    if _number(modes, "compiled_frames"):
        names.add("compile")
    _crowd(modes, loader, run, names, facts)
    names |= {name for name in ("cuda_graphs", "comm_hook") if modes.get(name)}
    return frozenset(names), facts


def _of_optimizer(kind: str, site: object = None) -> dict[str, str]:
    return {"optimizer": kind, "at_optimizer": f" at {site}" if site else ""}


def traced_optimizer(run: Run) -> tuple[frozenset[str], dict[str, str]]:
    """Names of PROGRAM and facts of the optimizer that takes longest in a trace, which has no arguments."""
    if not run.optimizers:
        return frozenset(), {}
    kind = run.optimizers[0]
    names = set() if kind in TORCH_OPTIMIZERS else {"optimizer_of_another"}
    names |= set() if kind in FUSED else {"never_fused"}
    return frozenset(names), _of_optimizer(kind)


def _plain(optimizer: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], run: RunRecord) -> dict[str, str]:
    """The optimizer that a ZeroRedundancyOptimizer has, where memory has room for all of its state."""
    at, state_bytes = optimizer.get("site"), STATE_OF_ADAM * _number(optimizer, "parameter_bytes")
    kinds = [str(row.get("kind")) for row in rows if row is not optimizer and row.get("site") == at]
    on_cpu = num_local_ranks(run) if any(row.get("kind") == "cpu" for row in run.devices) else 1
    sizes = [_number(row, "memory_bytes") for row in run.devices]
    memory = min(filter(None, sizes), default=0.0) / on_cpu
    if optimizer.get("kind") != "ZeroRedundancyOptimizer" or not kinds or state_bytes > LITTLE * memory:
        return {}
    return {"plain": kinds[0], "whole_state": byte_text(state_bytes), "rank_memory": byte_text(memory)}


def num_units(run: RunRecord) -> int:
    """Of FSDP, that the program has made; 0 where nobody watched."""
    return int(sum(_number(row, "times") for row in _rows(noted_program(run).get("units"))))


def is_one_unit(run: RunRecord) -> bool:
    """Whether the program has made a single unit of FSDP, of all of a large model."""
    rows = _rows(noted_program(run).get("units"))
    return num_units(run) == 1 and any(_number(row, "parameter_bytes") >= UNIT_BYTES for row in rows)


def num_parameters(run: RunRecord) -> int:
    """Tensors that the optimizer with most of them updates; 0 where nobody watched."""
    row = _largest(noted_program(run).get("optimizers"), "num_parameters")
    return 0 if row is None else int(_number(row, "num_parameters"))


def parameter_dtype(run: RunRecord) -> str | None:
    """The widest of FLOATS that at least WIDE_PART of the bytes of some optimizer's, replica's or unit's
    parameters have; None where nobody watched."""
    program = noted_program(run)
    found = []
    for row in (row for name in ("optimizers", "wrappers", "units") for row in _rows(program.get(name))):
        sizes = row.get("bytes_of_dtypes")
        if isinstance(sizes, Mapping):
            least = WIDE_PART * sum(_number(sizes, dtype) for dtype in sizes)
            found += [dtype for dtype in FLOATS if _number(sizes, dtype) >= max(least, 1)]
    return max(found, key=lambda dtype: FLOATS[dtype], default=None)


def part_of_optimizers(run: RunRecord, num_bytes: float) -> float:
    """The least part of the time of all of them that num_bytes of the parameters of one may take; by bytes
    where they are alike. 1 where nobody watched."""
    rows = [(_number(row, "parameter_bytes"), row) for row in _rows(noted_program(run).get("optimizers"))]
    passes = [3 if row.get("kind") == "SGD" else 7 if row.get("fused") else 20 for _, row in rows]
    total = sum(num * size for num, (size, _) in zip(passes, rows, strict=True))
    fits = [num for num, (size, _) in zip(passes, rows, strict=True) if size >= num_bytes]
    least = min(fits or passes, default=0) * num_bytes
    return min(least / total, 1.0) if total > 0 else 1.0


def bytes_of_optimizers(run: RunRecord) -> float:
    """Of the parameters that all of them update; 0 where nobody watched."""
    rows = _rows(noted_program(run).get("optimizers"))
    return sum(_number(row, "parameter_bytes") for row in rows)


def workers_of(
    run: RunRecord, core_taken: float, waited_ms: float, had: CoresHad | None = None, rest_ms: float = 0.0
) -> tuple[frozenset[str], dict[str, str]]:
    """What is to be said of more workers: names of PROGRAM that hold, and how many have cores beside the one
    of each rank that trains. MOST_WORKERS where nobody counted the cores; more where these make batches
    slower than the rest of a step goes on, and what is waited for them then, where that is much.

    core_taken: part of the step in which others have the cores. waited_ms: for batches, in a step, of which
    rest_ms is the rest. had: as measured, less than LEAST_FREE of a core for each rank is none.
    """
    names = {"short_batch"} if 0 < waited_ms < HAND_OVER_MS else set()
    modes = noted_modes(run)
    cores = int(_number(modes, "num_cores"))
    if not cores:
        return frozenset(names), {"workers": str(MOST_WORKERS), "leaves": ""}
    free = cores // num_local_ranks(run) - 1
    is_used = had is not None and had.free < LEAST_FREE * num_local_ranks(run)
    if free < 1 or core_taken > CROWDED or is_used:
        names.add("no_core")
    workers, leaves = max(min(free, MOST_WORKERS), 1), ""
    if rest_ms > 0:
        enough = min(math.ceil(waited_ms / rest_ms), MOST_OF_ALL)
        workers = max(min(free, enough), workers)
        left_ms = waited_ms / workers - rest_ms
        if left_ms >= MUCH_LEFT * waited_ms:
            leaves = f" (which leaves {quantity(left_ms, 'ms')} of the wait)"
    return frozenset(names), {"workers": str(workers), "cores": str(cores), "leaves": leaves}


def rows_of(
    judged: Run, line: CodeLine | None, work: LoaderWork | None, batch_ms: float
) -> tuple[frozenset[str], dict[str, str]]:
    """Whether the time of a batch is that of its rows, which a data set of tensors gives one by one: in the
    name of PROGRAM, and what a data set of the program needs to give many.

    work: of workers; None where the line tells. batch_ms: of a batch, in the process that makes it.
    """
    loader = loader_of(noted_program(judged.noted)) or {}
    if loader.get("batch_size", 0) is None:  # whole batches are asked for
        return frozenset(), {}
    kind, of_tensors = str(loader.get("dataset")), "TensorDataset"
    if work is not None:
        each_ms = [(one.ms, [_row_of(frame, kind) for frame in one.frames]) for one in work.stacks]
        are_there = [sum(ms for ms, rows in each_ms if all(rows))]
        are_there += [sum(ms for ms, rows in each_ms if of_tensors in rows)]
        in_rows, in_tensors = (ms >= MOST * sum(ms for ms, _ in each_ms) for ms in are_there)
    elif line is not None:
        is_own = line.function == f"{kind}.__getitem__" and line.doing == "runs"
        pattern = CONVERTS_ROWS if is_own else TAKES_ROWS
        in_rows = pattern.fullmatch(line.calls) is not None
        in_tensors = line.calls == f"{of_tensors}.__getitem__ of torch"
    else:
        return frozenset(), {}
    is_short = batch_ms <= ROW_MS * _number(loader, "batch_size")
    if in_tensors or (in_rows and is_short and kind == of_tensors):
        return frozenset({"rows"}), {"takes_many": ""}
    sources = (source_of(file, judged.noted) for file in {one.at.file for one in pieces_of_run(judged)})
    if in_rows and is_short and any(one is not None and gives_rows(one.tree, kind) for one in sources):
        return frozenset({"rows"}), {"takes_many": f"; {kind}.__getitem__ takes that list then"}
    return frozenset(), {}


def _row_of(frame: StackFrame, kind: str) -> str:
    """The class of a data set that takes a row there, or what joins rows; '' of other work."""
    if frame.is_program:
        return kind if frame.outer_function == f"{kind}.__getitem__" else ""
    is_row = TAKES_ROWS.fullmatch(frame.text) or CONVERTS_ROWS.fullmatch(frame.text)
    return frame.function.partition(".")[0] if is_row else ""


def noted_line(place: tuple[str, int] | None) -> StackFrame | None:
    """A line that was noted in the process, of no known function."""
    return StackFrame(place[0], place[1], "<module>", True) if place else None


def crowded_at(run: RunRecord) -> StackFrame | None:
    """The line that gives torch more threads than the cores of a machine have room for."""
    return noted_line(noted_modes(run).get("threads_at")) if "own_threads" in program_of(run)[0] else None


def _crowd(
    modes: Mapping[str, Any],
    loader: Mapping[str, Any] | None,
    run: RunRecord,
    names: set[str],
    facts: dict[str, str],
) -> None:
    """Whether the ranks of a machine take cores from each other, and a process from itself, or leave most of
    them out, as the program asked for."""
    cores, num_ranks, others = usable_cores(run) or (0, 1, None)
    threads = int(_number(modes, "num_threads"))
    num_workers = 0 if loader is None else int(_number(loader, "num_workers"))
    set_at = modes.get("threads_at")
    place = f"{Path(set_at[0]).name}:{set_at[1]}" if set_at else ""
    # Workers are among the others.
    are_others_more = others is not None and others - num_ranks * num_workers > cores / 2
    each_fits = threads + num_workers <= cores
    if 0 < cores < num_ranks * (threads + num_workers) and not (are_others_more and each_fits):
        names.add("own_crowd")
        workers = f" and {counted(num_workers, 'loader worker')} (of {(loader or {}).get('site')})"
        each = f"{counted(threads, 'thread')} of torch{f' (set at {place})' if place else ''}"
        crowd = f"{counted(num_ranks, 'rank')} with {each}{workers if num_workers else ''} each"
        facts["whose"] = f"first of all their own: {crowd}, on {counted(cores, 'core')}"
        facts["others"] = "threads of the ranks themselves"
        if are_others_more:
            facts["whose"] = (
                f"their own, too: {crowd}, on {counted(cores, 'core')}, of which others have most"
            )
            facts["others"] = "others and by threads of the ranks themselves"
        enough = max(cores // num_ranks - num_workers, 1)
        env = run.environment.get("OMP_NUM_THREADS")
        is_set = bool(place) and (env is None or env != str(threads))
        names |= {"own_threads"} if is_set and threads > enough else set()
        fewer = f"torch.set_num_threads({enough}) at {place}" if is_set else f"OMP_NUM_THREADS={enough}"
        before = ", which goes before OMP_NUM_THREADS" if is_set and env else ""
        facts["fewer"] = f"{fewer}{before}" if threads > enough else "fewer loader workers (num_workers)"
    names |= {"few_threads"} if threads == 1 and not num_workers else set()
    if place and threads == 1 < cores:
        names.add("one_thread")
        facts |= {"whole_cores": str(cores), "threads_at": place}
    # torchrun sets it, where it starts more than one process and nothing else does.
    enough = cores // num_ranks - num_workers
    if not place and threads == 1 < enough and "1" in [run.environment.get(name) for name in THREADS]:
        names.add("omp_thread")
        facts |= {"whole_cores": str(cores), "omp_enough": str(enough)}


def threads_variable(run: RunRecord) -> str:
    """The one that sets torch's threads: MKL's number goes before OpenMP's, where torch is built with MKL."""
    return next((name for name in THREADS if name in run.environment), THREADS[-1])


def _loader(loader: Mapping[str, Any], names: set[str], facts: dict[str, str]) -> None:
    num_workers, epochs = int(_number(loader, "num_workers")), _number(loader, "num_epochs")
    names.add("workers" if num_workers else "workers_0")
    names |= {"pinned"} if loader.get("pin_memory") else set()
    names |= {"whole_batches"} if "batch_size" in loader and loader["batch_size"] is None else set()
    is_of_items = loader.get("is_on_device") and "whole_batches" not in names
    names |= {"items_on_device"} if is_of_items else set()
    names |= {"iterated_anew"} if MANY_EPOCHS < epochs >= ANEW * _number(loader, "num_batches") else set()
    is_short = epochs > 1 and _number(loader, "num_batches") < SHORT_EPOCH * epochs
    if num_workers and not loader.get("persistent_workers") and is_short:
        names.add("workers_new")
    facts |= _site("loader", loader) | {"num_workers": str(num_workers)}


def _units(units: Sequence[Mapping[str, Any]], names: set[str], facts: dict[str, str]) -> None:
    most = max(units, key=lambda row: _number(row, "times"))  # the root is another
    names |= {"blocks"} if _number(most, "num_parameters") >= WEIGHTS_OF_A_BLOCK else set()
    facts |= _site("units", most) | {"wrapper": str(most.get("kind"))}
    names.add("fsdp1" if most.get("kind") == FSDP1 else "fsdp2")
    # The model's own is made last, and torch keeps that gathered unless it is told otherwise.
    inner = units[:-1] if _number(units[-1], "times") == 1 else units
    is_resharded = any(
        row.get("reshard_after_forward") or row.get("sharding_strategy") in RESHARDED for row in inner
    )
    names |= set() if is_resharded else {"resharded_not"}
    names |= {"prefetched"} if all(row.get("prefetches") for row in units) else set()
    names |= {"offloaded"} if most.get("is_offloaded") else set()
    facts["offloading"] = "cpu_offload" if most.get("kind") == FSDP1 else "offload_policy"
    for name, keys in (
        ("reduced_narrow", ("reduce_dtype", "param_dtype")),
        ("gathered_narrow", ("param_dtype",)),
    ):
        moved = [next((row[key] for key in keys if row.get(key)), None) for row in units]
        names |= {name} if all(FLOATS.get(str(dtype)) == 2 for dtype in moved) else set()


def _ddp(wrapper: Mapping[str, Any], names: set[str], facts: dict[str, str]) -> None:
    cap = _number(wrapper, "bucket_cap_mb")
    names |= {"buckets_usual" if cap >= USUAL_BUCKET_MB else "buckets_small"} if cap > 0 else set()
    names.add("ddp")
    names |= {"bucket_view"} if wrapper.get("gradient_as_bucket_view") else set()
    is_sent = wrapper.get("broadcast_buffers") and _number(wrapper, "num_buffers") > 0
    names |= set() if is_sent else {"no_buffers"}
    size = _number(wrapper, "buffer_bytes")
    facts |= _site("ddp", wrapper) | {
        "bucket_cap_mb": f"{cap:.3g}",
        "buffers": f"{counted(int(_number(wrapper, 'num_buffers')), 'buffer')}, {byte_text(size)}",
    }


def _groups(optimizer: Mapping[str, Any], names: set[str], facts: dict[str, str]) -> None:
    """Whether the optimizer goes through a few parameters at a time, and needs not."""
    groups, unlike, parameters = (
        int(_number(optimizer, name)) for name in ("num_groups", "num_unlike_groups", "num_parameters")
    )
    if groups >= MANY_GROUPS and parameters <= FEW_PARAMETERS * groups and unlike <= FEWER_GROUPS * groups:
        names.add("many_groups")
        facts["groups"] = f"{groups:,} parameter groups of {parameters:,} parameters"
        facts["fewer_groups"] = {
            1: "one, as all have the same options",
            2: "two, as with and without weight decay",
        }.get(unlike, f"the {unlike} whose options differ")


def _site(name: str, row: Mapping[str, Any]) -> dict[str, str]:
    site = row.get("site")
    return {f"{name}_site": str(site)} if site else {}


def _rows(rows: Any) -> Sequence[Mapping[str, Any]]:
    """The rows of a table of run.json, which may be anybody's."""
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _largest(rows: Any, by: str) -> Mapping[str, Any] | None:
    return max(_rows(rows), key=lambda row: _number(row, by), default=None)


def loader_of(program: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The loader that gave most batches, as the program made it: accelerate takes batches of one of its own,
    which it makes of a program's loader that gives none, and whose line is that of prepare()."""
    rows = _rows(program.get("loaders"))
    found = _largest(rows, "num_batches")
    if found is None or found.get("batch_size") is not None:
        return found
    handed_on = ("dataset", "num_workers", "persistent_workers", "prefetch_factor", "pin_memory")
    twins = [
        row
        for row in rows
        if not row.get("num_batches")
        and row.get("batch_size") is not None
        and all(row.get(name) == found.get(name) for name in handed_on)
    ]
    # Of those that prepare() took together, the first: programs make what they train on before the others.
    is_one = len(twins) == 1 or len(twins) == found.get("times")
    if not twins or not is_one:
        return found
    made = twins[0]
    return {**found, "batch_size": made["batch_size"], "site": made.get("site")}


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


# -- libraries -----------------------------------------------------------------------------------------------


LIBRARIES = ("fsdp2", "fsdp1", "ddp", "gloo", "compile", "pipeline", "inference", "server", "any")
COMPILED = re.compile(r"triton_(poi|red|per|tem|for)_")
"""Kernels that inductor generates; a program's own Triton kernels have other names."""
FUSED_KERNELS = re.compile(r"Fused(Adam|Adagrad|Sgd|SGD|Optimizer)|multi_tensor_adam")
STACKS = (*LIBRARIES, "on_device", *PROGRAM)
"""What a rule may ask for: libraries that are used, that a device computes, and what the program has set."""


def stack_of(run: Run) -> frozenset[str]:
    names = {"any", *run.libraries}
    modules = _modules(run)
    ops = {name.partition(".")[2] for name in run.metrics if name.startswith("count.")}
    if any(name.startswith(("bucket ", "DistributedDataParallel")) for name in modules):
        names.add("ddp")
    gathers = {"all_gather", "reduce_scatter"} <= ops
    if gathers and "ddp" not in names and "units" not in noted_program(run.noted):
        names.add("fsdp2")  # where nobody looked for units
    if run.source in TRACE_SOURCES and run.host_parts and not _trains(run):
        names.add("inference")
    if ops & POINT_TO_POINT:
        names.add("pipeline")
    if any("expandable_segments:True" in value for value in _environment(run).values()):
        names.add("expandable")
    if _environment(run).get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        names.add("one_queue")
    if (run.noted.layout or {}).get("compile"):
        names.add("compile")
    names |= program_of(run.noted)[0] | traced_optimizer(run)[0]
    names |= told_by_kernels(operations(run.metrics, NAME_TIME))
    if run.source == "host":  # there torch takes one tensor at a time unless it is asked for more
        names = names - {"foreach_off"} | {"gloo"}
    else:
        names.add("on_device")
    return frozenset(names)


def _trains(judged: Run) -> bool:
    """Whether a trace that shows its host has a backward pass or an update, there or as kernels: these may be
    named like copies of lists of tensors, which servers make as well."""
    return (judged.updates and "server" not in judged.libraries) or any(
        judged.mean_of_host(f"host.{kind}{where}")
        for kind in ("backward", "optimizer")
        for where in ("", ".after")
    )


def told_by_kernels(kernels: Iterable[str]) -> frozenset[str]:
    """What is in force, since its kernels ran: torch.compile's generated ones, a fused optimizer's."""
    found = set()
    for name in kernels:
        found |= {"compile"} if COMPILED.match(name) else set()
        found |= {"fused"} if FUSED_KERNELS.search(name) else set()
    return frozenset(found)


def _modules(run: Run) -> list[str]:
    """Of the first judged step of the first rank; traces do not name any, and take long to read again."""
    if run.source in TRACE_SOURCES:
        return []
    first = int(run.global_step[min(run.num_warmup, run.num_steps - 1)])
    judged = (record.modules for record in run.records(run.ranks[0]) if record.global_step >= first)
    return next(filter(None, islice(judged, 100)), [])  # only a line with details has them
