"""Rows left out by model take along what their model alone told."""

import math
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.interval_widths import WIDTHS, Judged, without_own_settings
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


def test_a_mixture_left_out_is_judged_by_what_is_printed_for_a_new_one():
    """Widths of what is known and of what is not known are added as squares; an interval ends at `needed`."""
    row = Judged(None, "model", math.log(1.6), 0.3, 0.4, 1.0)
    assert row.width == pytest.approx(0.5)
    assert row.needed == pytest.approx(math.log(1.6) / WIDTHS.skew_high)
    assert not row.inside
    assert row._replace(new_width=0.6).inside
    assert row._replace(log_error=-0.3).inside
