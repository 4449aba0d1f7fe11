"""Where the numbers of steps go: what is written, and what happens when a sink fails."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aorta.errors import ConfigError
from aorta.records.schema import StepRecord
from aorta.sinks import check_target, open_sinks
from aorta.sinks.prometheus import PrometheusFile
from aorta.sinks.scalars import scalars
from aorta.sinks.sink import Sinks

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "example" / "fsdp" / "rank_0_metrics.jsonl"
DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "aorta.json"


@pytest.fixture(scope="module")
def records() -> list[StepRecord]:
    lines = EXAMPLE.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=StepRecord) for line in lines]


def test_what_was_not_measured_is_left_out(records: list[StepRecord]) -> None:
    values = scalars(records[5])
    assert values["step_ms"] == records[5].step_ms
    assert "sm_clock_mhz" not in values
    assert all(isinstance(value, int | float) for value in values.values())


def test_prometheus_text_is_valid_and_whole(tmp_path: Path, records: list[StepRecord]) -> None:
    said: list[str] = []
    sinks = open_sinks([f"prometheus={tmp_path}/node/aorta.prom"], 1, 2, said.append)
    logged = msgspec.structs.replace(records[-1], scalars={"my lr": 0.5})
    for record in [*records[:-1], logged]:
        sinks.add(record)
    sinks.close()
    text = (tmp_path / "node" / "aorta_rank1.prom").read_text()
    assert f'aorta_steps_total{{rank="1",world_size="2"}} {len(records)}\n' in text
    assert 'aorta_my_lr{rank="1",world_size="2"} 0.5\n' in text
    names = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", text, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["aorta_rank1.prom"]
    assert said == []
    if (promtool := shutil.which("promtool")) is not None:
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_the_dashboard_asks_for_metrics_that_are_written(tmp_path: Path, records: list[StepRecord]) -> None:
    full = msgspec.structs.replace(records[-1], tokens=128)
    text = "".join(PrometheusFile(tmp_path / "a.prom", 0, 2).lines(full))
    asked = set(re.findall(r"aorta_[a-z_]+", DASHBOARD.read_text()))
    written = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    of_devices = {"aorta_device_used_bytes", "aorta_memory_reserved_bytes", "aorta_sm_clock_hertz",
                  "aorta_power_watts"}  # fmt: skip
    assert asked - written <= of_devices


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """Its own parser, through a file of rules; Grafana's variables are put in as Grafana does."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]]
    assert queries
    assert not any("$" in query for query in queries)
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True)
    assert checked.returncode == 0, checked


@pytest.mark.heavy
def test_tensorboard_has_every_step(tmp_path: Path, records: list[StepRecord]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sinks = open_sinks([f"tensorboard={tmp_path}"], 0, 2, lambda line: None)
    for record in records:
        sinks.add(record)
    sinks.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("aorta/step_ms")] == [r.global_step for r in records]


def test_a_sink_that_fails_says_so_once(records: list[StepRecord]) -> None:
    class Broken:
        num = 0

        def add(self, record: StepRecord) -> None:
            self.num += 1
            raise OSError("disk full")

        def close(self) -> None: ...

    said: list[str] = []
    broken: Any = Broken()
    sinks = Sinks({"broken": broken}, said.append)
    for record in records:
        sinks.add(record)
    sinks.close()
    assert (broken.num, said) == (1, ["--to broken gets nothing more: OSError: disk full"])


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    said: list[str] = []
    open_sinks(["wandb=project"], 0, 1, said.append).close()
    assert said == ["--to wandb=project: wandb is not installed; pip install wandb"]


def test_an_unknown_sink_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mlflow'"):
        check_target("mlfow=x")
