"""Callbacks of libraries: the loop that all share, and each library where it is installed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from aorta.integrations.loop import LibraryLoop
from aorta.records.schema import StepRecord


def lines(folder: Path) -> list[StepRecord]:
    text = (folder / "rank_0_metrics.jsonl").read_bytes()
    return [msgspec.json.decode(line, type=StepRecord) for line in text.splitlines()]


@pytest.mark.heavy
def test_steps_scalars_and_pauses(tmp_path: Path) -> None:
    loop = LibraryLoop(tmp_path, {})
    loop.step_ends()  # out of turn: nothing happens
    for step in range(3):
        loop.step_begins(step)
        loop.step_ends()
        loop.log(loss=float(step), lr=None)
        loop.pause_begins()
    loop.step_begins(3)  # the loop ends in the middle of it
    loop.close()
    assert [(line.global_step, line.loss) for line in lines(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.heavy
def test_accelerate_ends_a_step_with_the_update(tmp_path: Path) -> None:
    from aorta.integrations.accelerate import record

    accelerator = SimpleNamespace(sync_gradients=False)
    recording = record(accelerator, tmp_path)
    for micro_batch in range(6):
        accelerator.sync_gradients = micro_batch % 3 == 2
        with recording.step() as step:
            step.log(loss=float(micro_batch))
    recording.close()
    assert [(line.global_step, line.loss) for line in lines(tmp_path)] == [(0, 2.0), (1, 5.0)]


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (extra integrations)")
    from aorta.integrations.transformers import AortaCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            return {"loss": (self.layer(x) - labels).square().mean()}

    data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=4, gradient_accumulation_steps=2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = AortaCallback(tmp_path / "run")
    transformers.Trainer(model=Net(), args=arguments, train_dataset=data, callbacks=[callback]).train()
    assert [line.global_step for line in lines(tmp_path / "run")] == [0, 1, 2, 3]
    assert all(line.loss is not None for line in lines(tmp_path / "run"))
