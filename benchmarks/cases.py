"""The training configurations that the harnesses run, how to make one, and cores for what launches."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aorta.config.layout import resolve_layout
from aorta.config.load import config_from_settings
from aorta.config.structs import Config
from aorta.launcher import launched_rank
from aorta.record import Recorder
from aorta.training.setup import BatchFeed, choose_device, set_arithmetic, start_process_group
from aorta.training.trainer import TrainingRun

_DENSE = {"num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000}
_LARGE = {**_DENSE, "hidden": 4096, "ffn": 11008, "num_layers": 8}
_SMALL = {**_DENSE, "hidden": 2048, "ffn": 5632, "num_layers": 8}

CASES: dict[str, dict[str, Any]] = {
    "fsdp": {
        "model": _LARGE,
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp"},
    },
    "fsdp_short": {
        "model": _LARGE,
        "training": {"batch_size": 1},
        "data": {"seq_len": 512},
        "parallel": {"mode": "fsdp"},
    },
    "tp": {
        "model": {**_LARGE, "num_layers": 4},
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp", "tp": 2},
    },
    "ddp": {
        "model": _SMALL,
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "ddp"},
    },
    "ddp_long": {  # the device paces it, as in "ddp" it need not
        "model": _SMALL,
        "training": {"batch_size": 8},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "ddp"},
    },
    "moe": {
        "model": {
            **_SMALL,
            "num_layers": 4,
            "num_experts": 8,
            "num_active_experts": 2,
            "capacity_factor": 1.25,
        },
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp", "ep": 2},
    },
    "fsdp_compile": {
        "model": _LARGE,
        "training": {"batch_size": 2},
        "data": {"seq_len": 2048},
        "parallel": {"mode": "fsdp"},
        "compile": {"enabled": True},
    },
}
"""fsdp: 8 layers, d 4096, batch 2 x 2048. fsdp_short: the same at 1 x 512. bf16 throughout."""

TINY: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"mode": "ddp"}},
    "fsdp": {"parallel": {"mode": "fsdp"}},
    "tp": {"parallel": {"mode": "fsdp", "tp": 2}},
    "moe": {
        "parallel": {"mode": "fsdp", "ep": 2},
        "model": {"num_experts": 4, "num_active_experts": 2, "capacity_factor": 1.25},
    },
    "tp_moe": {
        "parallel": {"mode": "fsdp", "tp": 2},
        "model": {"num_experts": 4, "num_active_experts": 2},
    },
    "tp_ep": {
        "parallel": {"mode": "fsdp", "tp": 2, "ep": 2},
        "model": {"num_experts": 4, "num_active_experts": 2},
    },
}
"""Small enough for a CPU; what bit-identity is checked on."""


CASES |= {f"tiny_{name}": case for name, case in TINY.items()}


def config_of(case: dict[str, Any], **training: Any) -> Config:
    settings = {name: dict(section) for name, section in case.items()}
    settings.setdefault("training", {}).update(training)
    return config_from_settings(settings)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """The ranks of the launcher, on GPUs where there are enough, else on the CPU."""
    config = config_of({})
    ranks = launched_rank()
    device = choose_device(config, ranks)
    start_process_group(config, ranks, device)
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Job:
    """A model in training, one step at a time, with or without a recorder."""

    def __init__(self, config: Config, device: torch.device) -> None:
        set_arithmetic(config)
        self.config = config
        ranks = launched_rank()
        self.run = TrainingRun(config, ranks, resolve_layout(config, ranks.world_size), device)
        self.tokens = config.training.batch_size * config.data.seq_len
        self.next_step = 0
        self.feed = BatchFeed(config, self.run.dp_rank, device, 0)
        self.losses: list[torch.Tensor] = []

    def step(self, recorder: Recorder | None = None) -> int:
        """One training step; its number."""
        number = self.next_step
        self.next_step += 1
        if recorder is None:
            loss, _, _ = self.run.step(number, self.feed)
        else:
            with recorder.step(tokens=self.tokens, global_step=number) as record:
                loss, grad_norm, lr = self.run.step(number, self.feed)
                record.log(loss=loss, grad_norm=grad_norm, lr=lr)
        self.losses.append(loss)
        return number

    def close(self) -> None:
        """Free the device's memory for the next job."""
        del self.run, self.feed
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def environment() -> dict[str, Any]:
    """Device and versions for a result file."""
    from aorta.device.environment import collect_devices, collect_environment, collect_versions

    return {
        "versions": collect_versions(),
        "devices": collect_devices(),
        "environment": collect_environment(),
    }


# ---- cores of its own for a thread that launches, so that step times of a busy host can be compared ------

_LAUNCHING = "pt_autograd"
"""Name that torch gives the threads of its autograd engine."""


def pin_threads() -> None:
    """Give one of this rank's cores to this thread, one to the autograd engine, the rest to all else.

    A core is all its hardware threads, of which a launching thread uses the first and leaves the others idle.
    New threads inherit their maker's core, so call this again once the last is made. Does nothing where the
    share is under four cores.
    """
    import psutil

    share = _share_of(_cores(_seen), _local("RANK"), _local("WORLD_SIZE"))
    if len(share) < 4:
        return
    main, engine, *rest = share
    others = set().union(*rest)
    for task in Path("/proc/self/task").iterdir():
        thread = int(task.name)
        with suppress(OSError):  # it has ended
            launching = (task / "comm").read_text().startswith(_LAUNCHING)
            os.sched_setaffinity(thread, {min(engine)} if launching else others)
    os.sched_setaffinity(0, {min(main)})
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            child.cpu_affinity(list(others))


_seen: frozenset[int] = frozenset(os.sched_getaffinity(0))
"""CPUs of this process before anything was pinned."""


def _local(name: str) -> int:
    return int(os.environ.get(f"LOCAL_{name}", "0" if name == "RANK" else "1"))


def _cores(cpus: frozenset[int] | set[int]) -> list[frozenset[int]]:
    """The cores among these CPUs, each as its hardware threads, in order."""
    return sorted({_siblings(cpu) & cpus for cpu in cpus}, key=min)


def _siblings(cpu: int) -> frozenset[int]:
    try:
        listed = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return frozenset((cpu,))
    siblings: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        siblings.update(range(int(first), int(last or first) + 1))
    return frozenset(siblings)


def _share_of(cores: list[frozenset[int]], rank: int, num_ranks: int) -> list[frozenset[int]]:
    size = len(cores) // num_ranks
    return cores[rank * size : (rank + 1) * size]
