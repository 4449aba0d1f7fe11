"""The changes that what-ifs are judged by: a case, how the change is made in it, and how a user asks for it.

Four sets, each written before anything was predicted of it. first, second and third are training
configurations of this project; the fourth is of the programs beside this file, which also run on a CPU, at
sizes that only show that they do.
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from cases import CASES as USUAL_CASES
from cases import Job
from torch.profiler import record_function

LENGTHS = {"block": 6, "turns": 3}
"""Steps of a block, of which the first two are left out; blocks of each, unchanged and changed."""
FOURTH_LENGTHS = {"block": 8, "turns": 4}
SHORT = {"training": {"batch_size": 1}, "data": {"seq_len": 512}}
CASES = {**USUAL_CASES, "ddp_short": {**USUAL_CASES["ddp"], **SHORT}}
Hook = Callable[[Any, int], None]
"""Called with the job and the number of the step."""
_HEADS = {"num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000}
SECOND_CASES: dict[str, dict[str, Any]] = {
    "fsdp_deep": {
        "model": {**_HEADS, "hidden": 3072, "ffn": 8192, "num_layers": 12},
        "training": {"batch_size": 2},
        "data": {"seq_len": 1024},
        "parallel": {"mode": "fsdp"},
    },
    "ddp_deep": {
        "model": {**_HEADS, "hidden": 2048, "ffn": 5632, "num_layers": 12},
        "training": {"batch_size": 1},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "ddp"},
    },
    "tp_short": {
        "model": {**_HEADS, "hidden": 4096, "ffn": 11008, "num_layers": 6},
        "training": {"batch_size": 1},
        "data": {"seq_len": 1024},
        "parallel": {"mode": "fsdp", "tp": 2},
    },
    "moe_short": {**USUAL_CASES["moe"], **SHORT},
}
THIRD_CASES: dict[str, dict[str, Any]] = {
    "fsdp_wide": {
        "model": {**_HEADS, "num_heads": 40, "hidden": 5120, "ffn": 13824, "num_layers": 4},
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp"},
    },
    "fsdp_read": {
        "model": {**_HEADS, "hidden": 2048, "ffn": 5632, "num_layers": 10},
        "training": {"batch_size": 1},
        "data": {"seq_len": 1024},
        "parallel": {"mode": "fsdp"},
    },
    "ddp_wide": {
        "model": {**_HEADS, "num_heads": 24, "hidden": 3072, "ffn": 8192, "num_layers": 6},
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "ddp"},
    },
    "ddp_loader": {
        "model": {**_HEADS, "hidden": 2048, "ffn": 5632, "num_layers": 6},
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "ddp"},
    },
    "ddp_late": {
        "model": {**_HEADS, "hidden": 2048, "ffn": 5632, "num_layers": 4},
        "training": {"batch_size": 2},
        "data": {"seq_len": 1024},
        "parallel": {"mode": "ddp"},
    },
    "tp_wide": {
        "model": {**_HEADS, "num_heads": 40, "hidden": 5120, "ffn": 13824, "num_layers": 3},
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp", "tp": 2},
    },
    "moe_wide": {
        "model": {
            **_HEADS, "hidden": 2048, "ffn": 4096, "num_layers": 3, "num_experts": 4,
            "num_active_experts": 2, "capacity_factor": 1.25,
        },
        "training": {"batch_size": 3},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp", "ep": 2},
    },
    "pipeline": {
        "pipeline": {"hidden": 4096, "num_layers": 8, "batch_size": 8, "seq_len": 1024, "micro_batches": 4}
    },
}  # fmt: skip
_TEXT = {"vocab_size": 32000, "seq_len": 2048}
FOURTH_CASES: dict[str, dict[str, Any]] = {
    "images": {
        "program": {
            "kind": "images", "hidden": 1024, "num_heads": 16, "num_layers": 24, "batch_size": 96,
            "image_size": 224,
        }
    },
    "compiled": {
        "program": {
            **_TEXT, "kind": "sharded", "hidden": 3072, "num_heads": 24, "num_layers": 10, "batch_size": 3,
            "compile": True,
        }
    },
    "eager": {
        "program": {
            **_TEXT, "kind": "language_ddp", "hidden": 2560, "num_heads": 20, "num_layers": 8,
            "batch_size": 3,
        }
    },
    "twice": {
        "program": {
            **_TEXT, "kind": "sharded", "hidden": 2560, "num_heads": 20, "num_layers": 8, "batch_size": 2,
            "accumulate": 2,
        }
    },
    "mesh": {
        "program": {
            **_TEXT, "kind": "two_dimensional", "hidden": 4096, "num_heads": 32, "num_layers": 10,
            "batch_size": 3,
        }
    },
    "stages": {
        "program": {
            **_TEXT, "kind": "stages", "hidden": 2560, "num_heads": 20, "num_layers": 16, "batch_size": 2,
            "micro_batches": 8,
        }
    },
    "conv_late": {"program": {"kind": "convolutions", "width": 64, "batch_size": 192, "image_size": 224}},
    "conv_loader": {"program": {"kind": "convolutions", "width": 64, "batch_size": 128, "image_size": 224}},
    "flat": {
        "program": {
            **_TEXT, "kind": "flat", "hidden": 1024, "num_heads": 16, "num_layers": 12, "batch_size": 1,
            "seq_len": 512,
        }
    },
}  # fmt: skip
_TWICE = ["optimizer x2", "host of Optimizer.step x2"]


def delay(seconds: float, rank: int | None = None) -> Hook:
    def before(job: Job, number: int) -> None:
        if rank is None or dist.get_rank() == rank:
            time.sleep(seconds)

    return before


def read_loss(job: Job, number: int) -> None:
    if job.losses:
        job.losses[-1].item()


def slow_transform(seconds: float) -> Hook:
    """Makes every batch take longer to read, from the first call on."""

    def before(job: Job, number: int) -> None:
        feed: Any = job.feed
        if not hasattr(feed, "quick_take"):
            feed.quick_take = feed.take

            def take() -> Any:
                with record_function("load_batch"):
                    time.sleep(seconds)
                    return feed.quick_take()

            feed.take = take

    return before


def quick_transform(job: Job, number: int) -> None:
    feed: Any = job.feed
    if hasattr(feed, "quick_take"):
        feed.take = feed.quick_take
        del feed.quick_take


def second_optimizer_step(job: Job, number: int) -> None:
    """Makes every optimizer step run twice."""
    optimizer: Any = job.run.optimizer
    if not hasattr(optimizer, "single_step"):
        optimizer.single_step = optimizer.step
        optimizer.step = lambda: (optimizer.single_step(), optimizer.single_step())


def single_optimizer_step(job: Job) -> None:
    optimizer: Any = job.run.optimizer
    if hasattr(optimizer, "single_step"):
        optimizer.step = optimizer.single_step
        del optimizer.single_step


class Change:
    """One change: how it is made, and how a user would ask for it."""

    def __init__(
        self,
        case: str,
        name: str,
        asked: list[str],
        hook: Hook | None = None,
        after: Hook | None = None,
        probed: dict[str, int] | None = None,
        **settings: Any,
    ) -> None:
        self.case, self.name, self.asked, self.hook, self.after, self.settings = (
            case, name, asked, hook, after, settings,
        )  # fmt: skip
        self.probed = probed
        """Operations and bytes that fewer channels are probed with."""


CHANGES = [
    Change("fsdp", "batch 4", ["batch x2"], training={"batch_size": 4}),
    Change("fsdp", "batch 1", ["batch x0.5"], training={"batch_size": 1}),
    Change("fsdp", "2 micro-batches", ["accumulation x2"], training={"grad_accum_steps": 2}),
    Change("fsdp", "no reshard", ["no reshard"], parallel={"reshard_after_forward": False}),
    Change("fsdp", "forward prefetch 1", ["prefetch +1"], parallel={"forward_prefetch": 1}),
    Change("fsdp", "optimizer twice", ["optimizer x2", "host of Optimizer.step x2"], second_optimizer_step),
    Change("fsdp", "loss read each step", ["sync each step"], after=read_loss),
    Change("fsdp", "rank 1 sleeps 30 ms", ["rank 1 +30ms"], delay(0.030, 1)),
    Change("fsdp_short", "loss read each step", ["sync each step"], after=read_loss),
    Change("fsdp_short", "loader 15 ms", ["loader +15ms"], delay(0.015)),
    Change("fsdp_short", "rank 1 sleeps 15 ms", ["rank 1 +15ms"], delay(0.015, 1)),
    Change("fsdp_short", "no reshard", ["no reshard"], parallel={"reshard_after_forward": False}),
    Change(
        "fsdp_short", "optimizer twice", ["optimizer x2", "host of Optimizer.step x2"], second_optimizer_step
    ),
    Change("ddp", "buckets of 100 MiB", ["buckets x4"], parallel={"bucket_cap_mb": 100.0}),
    Change("ddp", "buckets of 5 MiB", ["buckets x0.2"], parallel={"bucket_cap_mb": 5.0}),
    Change("ddp", "batch 4", ["batch x2"], training={"batch_size": 4}),
    Change("ddp", "2 micro-batches", ["accumulation x2"], training={"grad_accum_steps": 2}),
    Change("ddp", "rank 1 sleeps 20 ms", ["rank 1 +20ms"], delay(0.020, 1)),
    Change("ddp_short", "loss read each step", ["sync each step"], after=read_loss),
    Change("ddp_short", "loader 10 ms", ["loader +10ms"], delay(0.010)),
    Change("tp", "batch 4", ["batch x2"], training={"batch_size": 4}),
    Change("tp", "rank 1 sleeps 20 ms", ["rank 1 +20ms"], delay(0.020, 1)),
    Change("moe", "batch 4", ["batch x2"], training={"batch_size": 4}),
    Change("moe", "loader 40 ms", ["loader +40ms"], delay(0.040)),
]


SECOND_CHANGES = [
    Change("fsdp_deep", "batch 1", ["batch x0.5"], training={"batch_size": 1}),
    Change("fsdp_deep", "batch 3", ["batch x1.5"], training={"batch_size": 3}),
    Change("fsdp_deep", "no reshard", ["no reshard"], parallel={"reshard_after_forward": False}),
    Change("fsdp_deep", "3 micro-batches", ["accumulation x3"], training={"grad_accum_steps": 3}),
    Change("fsdp_deep", "loader 12 ms", ["loader +12ms"], delay(0.012)),
    Change("fsdp_deep", "rank 0 sleeps 25 ms", ["rank 0 +25ms"], delay(0.025, 0)),
    Change("fsdp_deep", "loss read each step", ["sync each step"], after=read_loss),
    Change("ddp_deep", "buckets of 10 MiB", ["buckets x0.4"], parallel={"bucket_cap_mb": 10.0}),
    Change("ddp_deep", "buckets of 200 MiB", ["buckets x8"], parallel={"bucket_cap_mb": 200.0}),
    Change("ddp_deep", "batch 2", ["batch x2"], training={"batch_size": 2}),
    Change(
        "ddp_deep", "optimizer twice", ["optimizer x2", "host of Optimizer.step x2"], second_optimizer_step
    ),
    Change("ddp_deep", "rank 1 sleeps 12 ms", ["rank 1 +12ms"], delay(0.012, 1)),
    Change("tp_short", "batch 2", ["batch x2"], training={"batch_size": 2}),
    Change("tp_short", "loader 10 ms", ["loader +10ms"], delay(0.010)),
    Change("tp_short", "loss read each step", ["sync each step"], after=read_loss),
    Change("moe_short", "batch 2", ["batch x2"], training={"batch_size": 2}),
    Change("moe_short", "rank 0 sleeps 10 ms", ["rank 0 +10ms"], delay(0.010, 0)),
    Change("moe_short", "loss read each step", ["sync each step"], after=read_loss),
]
"""Written before anything was predicted of them; nothing was changed after they were seen."""


PLANTED: dict[str, tuple[Hook | None, Hook | None]] = {
    "fsdp_read": (None, read_loss),
    "ddp_loader": (slow_transform(0.030), None),
    "ddp_late": (delay(0.020, 1), None),
}
"""Before and after every unchanged step of a case; a change has its own hooks instead."""


THIRD_CHANGES = [
    Change("fsdp_wide", "batch 3", ["batch x1.5"], training={"batch_size": 3}),
    Change("fsdp_wide", "no reshard", ["no reshard"], parallel={"reshard_after_forward": False}),
    Change("fsdp_wide", "2 micro-batches", ["accumulation x2"], training={"grad_accum_steps": 2}),
    Change(
        "fsdp_wide", "optimizer twice", ["optimizer x2", "host of Optimizer.step x2"], second_optimizer_step
    ),
    Change("fsdp_read", "loss not read", ["no sync"]),
    Change("fsdp_read", "batch 2", ["batch x2"], after=read_loss, training={"batch_size": 2}),
    Change(
        "fsdp_read", "2 micro-batches", ["accumulation x2"], after=read_loss, training={"grad_accum_steps": 2}
    ),
    Change(
        "fsdp_read", "no reshard", ["no reshard"], after=read_loss, parallel={"reshard_after_forward": False}
    ),
    Change("ddp_wide", "buckets of 50 MiB", ["buckets x2"], parallel={"bucket_cap_mb": 50.0}),
    Change("ddp_wide", "buckets of 12.5 MiB", ["buckets x0.5"], parallel={"bucket_cap_mb": 12.5}),
    Change("ddp_wide", "batch 3", ["batch x1.5"], training={"batch_size": 3}),
    Change("ddp_wide", "3 micro-batches", ["accumulation x3"], training={"grad_accum_steps": 3}),
    Change("ddp_wide", "loss read each step", ["sync each step"], after=read_loss),
    Change("ddp_loader", "quick transform", ["no loader delay"], quick_transform),
    Change("ddp_late", "rank 1 on time", ["rank 1 on time"]),
    Change("ddp_late", "batch 3", ["batch x1.5"], delay(0.020, 1), training={"batch_size": 3}),
    Change("tp_wide", "batch 1", ["batch x0.5"], training={"batch_size": 1}),
    Change("tp_wide", "loader 15 ms", ["loader +15ms"], delay(0.015)),
    Change("tp_wide", "loss read each step", ["sync each step"], after=read_loss),
    Change("moe_wide", "batch 2", ["batch x0.6667"], training={"batch_size": 2}),
    Change("moe_wide", "2 micro-batches", ["accumulation x2"], training={"grad_accum_steps": 2}),
    Change("moe_wide", "rank 1 sleeps 30 ms", ["rank 1 +30ms"], delay(0.030, 1)),
    Change("pipeline", "loader 10 ms", ["loader +10ms"], delay(0.010)),
    Change("pipeline", "rank 1 sleeps 15 ms", ["rank 1 +15ms"], delay(0.015, 1)),
]
"""Written before anything was predicted of them, as SECOND_CHANGES."""


FOURTH_PLANTED: dict[str, tuple[Hook | None, Hook | None]] = {
    "twice": (None, read_loss),
    "conv_late": (delay(0.070, 0), None),
    "conv_loader": (slow_transform(0.080), None),
}


FOURTH_CHANGES = [
    Change("images", "buckets of 100 MiB", ["buckets x4"], program={"bucket_cap_mb": 100}),
    Change("images", "buckets of 6 MiB", ["buckets x0.24"], program={"bucket_cap_mb": 6}),
    Change("images", "batch 144", ["batch x1.5"], program={"batch_size": 144}),
    Change("images", "2 micro-batches", ["accumulation x2"], program={"accumulate": 2}),
    Change("images", "optimizer twice", _TWICE, second_optimizer_step),
    Change("images", "2 channels", [], probed={"all_reduce": 32 << 20}, program={"channels": 2}),
    Change("twice", "4 micro-batches", ["accumulation x2"], after=read_loss, program={"accumulate": 4}),
    Change("twice", "loss not read", ["no sync"]),
    Change("twice", "batch 3", ["batch x1.5"], after=read_loss, program={"batch_size": 3}),
    Change("mesh", "batch 4", ["batch x1.3333"], program={"batch_size": 4}),
    Change("mesh", "rank 1 sleeps 40 ms", ["rank 1 +40ms"], delay(0.040, 1)),
    Change("mesh", "loss read each step", ["sync each step"], after=read_loss),
    Change("stages", "batch 3", ["batch x1.5"], program={"batch_size": 3}),
    Change("stages", "optimizer twice", _TWICE, second_optimizer_step),
    Change("stages", "rank 1 sleeps 60 ms", ["rank 1 +60ms"], delay(0.060, 1)),
    Change("conv_late", "rank 0 on time", ["rank 0 on time"]),
    Change("conv_loader", "quick transform", ["no loader delay"], quick_transform),
    Change("eager", "3 micro-batches", ["accumulation x3"], program={"accumulate": 3}),
    Change("eager", "loader 50 ms", ["loader +50ms"], delay(0.050)),
    Change("eager", "loss read each step", ["sync each step"], after=read_loss),
    Change("eager", "compiled", ["compile"], program={"compile": True}),
    Change("compiled", "no reshard", ["no reshard"], program={"reshard": False}),
    Change("compiled", "forward prefetch", ["prefetch +1"], program={"forward_prefetch": True}),
    Change("compiled", "batch 2", ["batch x0.6667"], program={"batch_size": 2}),
    Change("compiled", "rank 0 sleeps 60 ms", ["rank 0 +60ms"], delay(0.060, 0)),
    Change(
        "compiled", "4 channels", [], probed={"all_gather": 216 << 20, "reduce_scatter": 432 << 20},
        program={"channels": 4},
    ),
    Change("flat", "graph", ["graphs"], program={"graph": True}),
]  # fmt: skip
"""Written before anything was predicted of them, on other programs than those above."""


def choose_set(name: str) -> None:
    """Put the cases and changes of a set in place of the first."""
    if name == "second":
        CASES.update(SECOND_CASES)
        CHANGES[:] = SECOND_CHANGES
    if name == "third":
        CASES.update(THIRD_CASES)
        CHANGES[:] = THIRD_CHANGES
    if name == "fourth":
        CASES.update(FOURTH_CASES)
        PLANTED.update(FOURTH_PLANTED)
        CHANGES[:] = FOURTH_CHANGES
        LENGTHS.update(FOURTH_LENGTHS)
