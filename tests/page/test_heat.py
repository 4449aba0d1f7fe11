"""The map of ranks and steps says what the table below it says."""

from pathlib import Path

import numpy as np
import pytest

from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.ranks import judged_ranks
from aorta.account.load.open import load_run
from aorta.page.heat import heat_metrics

DATA = Path(__file__).resolve().parents[1] / "data"


def test_the_map_blames_a_rank_for_as_many_ms_as_the_table() -> None:
    runs = dataset("a", [judge(load_run(DATA / "run_late_rank", "a"))])
    (blame,) = (metric for metric in heat_metrics(runs) if metric.name == "caused_ms")
    means = np.nanmean(blame.values[:, runs.first.num_warmup :], axis=1)
    table = {row.rank: row.caused_ms for row in judged_ranks(runs.first)}
    assert means.tolist() == pytest.approx([table[rank] for rank in runs.first.ranks])


def test_where_nobody_knows_who_came_last_the_map_blames_nobody() -> None:
    runs = dataset("a", [judge(load_run(DATA / "run_fsdp", "a"))])
    assert {row.caused_ms for row in judged_ranks(runs.first)} == {None}
    assert "caused_ms" not in {metric.name for metric in heat_metrics(runs)}
