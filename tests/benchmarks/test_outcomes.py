"""Sweeps of layouts with a known outcome: verdicts of memory and the order, on a table written by hand."""

import csv
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.outcomes import judged, text

LAYOUT = {
    "gpu": "A100", "n_gpus": "64", "model": "llama-65b", "precision": "bf16", "seq": "2048", "gbs": "1024",
    "pp": "2", "shard": "distopt", "recompute": "none", "framework": "megatron-lm", "complete": "yes",
    "source": "arXiv 2311.05610", "attention": "flash",
}  # fmt: skip


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def sweep(tmp_path):
    """Three layouts that ran, the fastest with the fewest splits, and one that cannot have."""
    rates = {"2": "800", "4": "600", "8": "400"}
    ran = [
        LAYOUT | {"id": f"s-a-t{tp}", "tp": tp, "mbs": "1", "tok_s_gpu": rate} for tp, rate in rates.items()
    ]
    failed = LAYOUT | {"id": "s-a-m8t1", "tp": "1", "mbs": "8", "tok_s_gpu": ""}
    write(tmp_path / "layouts_x_ran.csv", ran)
    write(tmp_path / "layouts_x_failed.csv", [failed])
    return tmp_path


def test_outcomes_of_a_sweep(sweep):
    found = judged(sweep)
    assert sum(found["ran"].values()) == 3
    assert found["failed"] == {"fits": 0, "tight": 0, "does not fit": 1}
    order = found["order"]
    assert (order["pairs"], order["right_pairs"]) == (3, 3)
    assert (order["groups"], order["best_within_5_pct"]) == (1, 1)
    assert "3 of 3 pairs in the right order" in text(found)
