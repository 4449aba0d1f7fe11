"""The libraries that a run uses, as far as its records tell: what a change is spelled for."""

import re
from collections.abc import Iterable

import numpy as np

from aorta.account.load.rank.kernels import NAME_TIME
from aorta.account.metrics import operations
from aorta.account.model import Run
from aorta.timeline.collective import POINT_TO_POINT
from aorta.timeline.types import TRACE_SOURCES
from aorta.why.causes.program import PROGRAM, program_of

LIBRARIES = (
    *("fsdp2", "ddp", "tp", "nccl", "rccl", "gloo", "dataloader", "compile", "moe", "pipeline"),
    *("inference", "any"),
)
COMPILED = re.compile(r"triton_(poi|red|per|tem|for)_")
"""Kernels that inductor generates; a program's own Triton kernels have other names."""
FUSED = re.compile(r"Fused(Adam|Adagrad|Sgd|SGD|Optimizer)|multi_tensor_adam")
STACKS = (*LIBRARIES, *PROGRAM)
"""What a rule may ask for: libraries that are used, and what the program has set."""


def stack_of(run: Run) -> frozenset[str]:
    names = {"any"}
    record = run.record
    modules = _modules(run)
    ops = {name.partition(".")[2] for name in run.metrics if name.startswith("count.")}
    if any(name.startswith(("bucket ", "DistributedDataParallel")) for name in modules):
        names.add("ddp")
    elif {"all_gather", "reduce_scatter"} <= ops:
        names.add("fsdp2")
    if run.source in TRACE_SOURCES and run.host_parts and not _trains(run):
        names.add("inference")
    if ops & POINT_TO_POINT:
        names.add("pipeline")
    if "all_to_all" in ops:
        names.add("moe")
    layout = (record.layout if record is not None else None) or {}
    if isinstance(layout.get("tp"), int) and layout["tp"] > 1:
        names.add("tp")
    if layout.get("compile"):
        names.add("compile")
    versions = record.versions if record is not None else {}
    if run.source == "host":
        names.add("gloo")
    elif versions.get("hip"):
        names.add("rccl")
    else:
        names.add("nccl")
    program = program_of(record)[0]
    if program & {"workers_0", "workers"}:
        names.add("dataloader")
    names |= program | told_by_kernels(operations(run.metrics, NAME_TIME))
    if "host.data" in run.host_parts and np.nan_to_num(run.host_parts["host.data"]).any():
        names.add("dataloader")
    return frozenset(names)


def _trains(judged: Run) -> bool:
    """Whether a trace that shows its host has a backward pass or an update, there or as kernels."""
    return judged.updates or any(
        judged.mean_of_host(f"host.{kind}{where}")
        for kind in ("backward", "optimizer")
        for where in ("", ".after")
    )


def told_by_kernels(kernels: Iterable[str]) -> frozenset[str]:
    """What is in force, since its kernels ran: torch.compile's generated ones, a fused optimizer's."""
    found = set()
    for name in kernels:
        found |= {"compile"} if COMPILED.match(name) else set()
        found |= {"fused"} if FUSED.search(name) else set()
    return frozenset(found)


def _modules(run: Run) -> list[str]:
    """Of the first judged step of the first rank; traces do not name any, and take long to read again."""
    if run.source in TRACE_SOURCES:
        return []
    first = int(run.global_step[min(run.num_warmup, run.num_steps - 1)])
    return next((record.modules for record in run.records(run.ranks[0]) if record.global_step >= first), [])
