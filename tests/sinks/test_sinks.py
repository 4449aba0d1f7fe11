"""Where the numbers of steps go: what is written, and what happens when a sink fails."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.errors import ConfigError
from aorta.records.schema import StepRecord
from aorta.sinks import Place, Sinks, check_target
from aorta.sinks.scalars import scalars

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example" / "fsdp" / "rank_0_metrics.jsonl"


@pytest.fixture(scope="module")
def records() -> list[StepRecord]:
    lines = EXAMPLE.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def test_what_was_not_measured_is_left_out(records: list[StepRecord]) -> None:
    values = scalars(records[5])
    assert values["step_ms"] == records[5].step_ms
    assert "sm_clock_mhz" not in values
    assert all(isinstance(value, int | float) for value in values.values())


@pytest.mark.heavy
def test_tensorboard_has_every_step(tmp_path: Path, records: list[StepRecord]) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard (extra report)"
    )
    sinks = Sinks([f"tensorboard={tmp_path}"], Place(tmp_path, 0, 2), lambda line: None)
    for record in records:
        sinks.add(record)
    sinks.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("aorta/step_ms")] == [r.global_step for r in records]


def test_a_sink_that_fails_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[StepRecord]
) -> None:
    class Broken:
        num = 0

        def add(self, record: StepRecord) -> None:
            self.num += 1
            raise OSError("disk full")

        def close(self) -> None: ...

    said: list[str] = []
    broken: Any = Broken()
    monkeypatch.setattr("aorta.sinks.mlflow.open_sink", lambda target, place: broken)
    sinks = Sinks(["mlflow=x"], Place(tmp_path, 0, 1), said.append)
    for record in records:
        sinks.add(record)
    sinks.close()
    assert (broken.num, said) == (1, ["--to mlflow=x gets nothing more: OSError: disk full"])


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    said: list[str] = []
    Sinks(["wandb=project"], Place(tmp_path, 0, 1), said.append).close()
    assert said == ["--to wandb=project: wandb is not installed; pip install wandb"]


def test_an_unknown_sink_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        check_target("mlfow=x")
