"""Projected steps as records."""

import json
from pathlib import Path

import pytest

from aorta.errors import ConfigError
from aorta.hardware import load_hardware
from aorta.projection.anchor import read_measured
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import Pricer
from aorta.projection.record import MOST_RANKS, group_of, to_timeline, write_record
from aorta.projection.step import project
from aorta.records.reader import read_run, read_steps
from aorta.timeline.overlap import overlap
from tests.dist.launch import run_python

ROOT = Path(__file__).resolve().parents[2]
FSDP = {"gpus_per_node": 4, "dp": 4, "global_batch_size": 8, "sharding": "fsdp2", "stack": "eager"}
PIPELINE = {"nodes": 1, "dp": 2, "tp": 2, "pp": 2, "vpp": 2, "global_batch_size": 16}


def projected(name, **plan):
    plan = Plan(**plan)
    pricer = Pricer(load_hardware("h200"), plan)
    return project(load_model(name), plan, pricer), pricer


@pytest.mark.parametrize(("name", "plan"), [("llama3-8b", FSDP), ("mixtral-8x7b", {**PIPELINE, "ep": 4})])
def test_every_rank_has_its_record(tmp_path, name, plan):
    found, pricer = projected(name, **plan)
    write_record(tmp_path / "run", found, pricer)
    run = read_run(tmp_path / "run")
    assert len(list((tmp_path / "run").glob("rank_*_metrics.jsonl"))) == run.world_size
    for rank in range(run.world_size):
        (step,) = read_steps(tmp_path / "run" / f"rank_{rank}_metrics.jsonl")
        assert (step.rank, step.source) == (rank, "projected")
        assert step.step_ms == pytest.approx(found.step_s * 1e3)
        for one in step.collectives or ():
            assert rank in one.ranks


def test_the_report_reads_a_projected_folder(tmp_path):
    found, pricer = projected("llama3-8b", **FSDP)
    write_record(tmp_path / "run", found, pricer)
    report = ["analysis/overlap_report.py", "--log-dir", tmp_path / "run", "--label", "projected"]
    done = run_python(*report, "--output", tmp_path / "out", "--no-page", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    exposed_ms = summary["datasets"]["projected"]["steps"]["exposed_ms"]["median"]
    assert exposed_ms == pytest.approx(found.breakdown_s["exposed_dp_comm"] * 1e3, rel=0.02)


def test_a_pipelined_step_shows_the_communication_inside_its_passes():
    """It was drawn as computing without a collective."""
    found, pricer = projected("mixtral-8x7b", **PIPELINE, ep=4)
    exposed = sum(
        seconds
        for name, seconds in found.breakdown_s.items()
        if name in ("exposed_tp_comm", "exposed_ep_comm")
    )
    for stage in range(2):
        record = overlap(to_timeline(found, pricer, stage=stage))
        assert record.comm_ms == pytest.approx(record.hidden_ms + record.exposed_ms)
        assert record.exposed_ms == pytest.approx(exposed * 1e3, rel=0.1)


@pytest.mark.parametrize(
    ("axis", "rank", "expected"),
    [
        pytest.param("tp", 5, [4, 5], id="neighbours"),
        pytest.param("dp", 5, [5, 7], id="every-second"),
        pytest.param("dp", 2, [0, 2], id="first-stage"),
    ],
)
def test_groups_of_a_rank(axis, rank, expected):
    """Eight ranks: two stages of two by two, tp innermost."""
    _, pricer = projected("llama3-8b", **PIPELINE)
    assert group_of(rank, axis, pricer) == expected


def test_too_many_ranks_are_refused(tmp_path):
    found, pricer = projected("llama3-8b", nodes=16, dp=128, global_batch_size=128)
    with pytest.raises(ConfigError, match=f"up to {MOST_RANKS}"):
        write_record(tmp_path / "run", found, pricer)
    assert not (tmp_path / "run").exists()


def test_a_projected_folder_is_no_measurement(tmp_path):
    found, pricer = projected("llama3-8b", **FSDP)
    write_record(tmp_path / "run", found, pricer)
    with pytest.raises(ConfigError, match="no measured steps"):
        read_measured(tmp_path / "run")
