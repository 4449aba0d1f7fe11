"""Whole runs of the trainer on a model of a few thousand parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from aorta.config.layout import validate
from aorta.config.load import config_from_settings
from aorta.errors import ConfigError
from aorta.launcher import launched_rank
from aorta.training import AgreedError, Summary
from aorta.training.trainer import TrainingRun

MODEL = {"hidden": 16, "ffn": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "vocab_size": 32}
MOE = {**MODEL, "num_experts": 4, "num_active_experts": 2}
Settings = dict[str, dict[str, Any]]


def settings(output_dir: Path, **sections: dict[str, Any]) -> Settings:
    result: Settings = {
        "training": {
            "output_dir": str(output_dir),
            "precision": "fp32",
            "batch_size": 2,
            "log_interval": 100,
        },
        "data": {"seq_len": 8},
        "model": dict(MODEL),
        "scheduler": {"warmup_steps": 3},
        "logging": {"tensorboard": False, "progress": False},
    }
    for name, section in sections.items():
        result[name] = {**result.get(name, {}), **section}
    return result


class Losses:
    """Stands for the recorder, which takes longer to begin than these runs last; hands out losses alone."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Any], None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def on_record(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def pausing(self, activity: str) -> Any:
        return nullcontext()

    @contextmanager
    def step(self, *, global_step: int, **_: object) -> Iterator[Any]:
        logged: dict[str, Any] = {}
        yield SimpleNamespace(log=logged.update)
        record = SimpleNamespace(loss=float(logged["loss"]), global_step=global_step)
        for callback in self._callbacks:
            callback(record)


def train_all(runs: list[Settings]) -> list[tuple[Summary, dict[str, torch.Tensor]]]:
    """Each run's summary and this rank's parameters after it."""
    results = []
    for index, run_settings in enumerate(runs):
        config = config_from_settings(run_settings)
        ranks = launched_rank()
        run = TrainingRun(config, ranks, validate(config, ranks.world_size), torch.device("cpu"))
        run._recorder = Losses  # type: ignore[method-assign]
        store = dist.PrefixStore(f"run{index}", dist.distributed_c10d._get_default_store())
        summary = run.train(store)
        parameters = {
            name: (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in run.form.plain.named_parameters()
        }
        results.append((summary, parameters))
    return results


def expect_config_error(run_settings: Settings) -> str:
    with pytest.raises(ConfigError) as error:
        train_all([run_settings])
    return str(error.value)


FORMS = {
    "ddp": {"parallel": {"mode": "ddp"}},
    "fsdp": {"parallel": {"mode": "fsdp"}},
    "tp": {"parallel": {"mode": "ddp", "dp": 1, "tp": 2}},
    "ep": {"parallel": {"mode": "fsdp", "ep": 2}, "model": MOE},
}


def expect_agreed_error(run_settings: Settings) -> str:
    with pytest.raises(AgreedError) as error:
        train_all([run_settings])
    return str(error.value)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
