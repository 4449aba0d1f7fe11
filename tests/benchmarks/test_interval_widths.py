"""Rows left out by model take along what their model alone told."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.interval_widths import without_own_settings
from projection.published import read_published
from projection.validate import judge

LINE = {
    "id": "x", "gpu": "GB200", "n_gpus": "64", "task": "pretrain", "precision": "bf16", "seq": "4096",
    "mbs": "1", "gbs": "1280", "ep": "16", "shard": "distopt", "recompute": "none", "tok_s_gpu": "15000",
    "framework": "megatron-bridge", "complete": "yes", "source": "performance-summary.md 26.04",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "faster"),
    [
        pytest.param("gpt-oss-120b", True, id="the model that told it"),
        pytest.param("gpt-oss-20b", False, id="another with windows and sinks"),
    ],
)
def test_a_model_left_out_takes_its_own_rule_along(model, faster):
    table = judge(*read_published(Path("table.csv"), [LINE | {"model": model}]))
    (row,) = table.rows
    projection = table.projections[id(row)]
    without = without_own_settings(row, projection)
    assert (without.step_s < 0.8 * projection.step_s) is faster
    assert (without is projection) is not faster
