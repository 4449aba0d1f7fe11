"""docs/programs.md states what benchmarks/results holds."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "programs.md"
ROW = re.compile(r"^\| (AG|RS|AR) (\d+),(\d+),(\d+) \|(.*)\|$")
OPS = {"AG": "ag_gemm", "RS": "gemm_rs", "AR": "gemm_ar"}


def comparisons():
    found = {}
    for ranks in (2, 4):
        path = ROOT / "benchmarks" / "results" / f"pipelining_{ranks}xh200.json"
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            for section in run["sections"]:
                if section["name"] == "strategies":
                    of = section["comparison"]
                    found[of["ranks"], of["op"], of["m"], of["k"], of["n"]] = of
    return found


def stated():
    ranks = 0
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        ranks = int(line.split()[1].strip("*")) if re.match(r"\| \*\*\d ranks", line) else ranks
        if ranks and (match := ROW.match(line)):
            kind, *shape, rest = match.groups()
            cells = [cell.strip(" *") for cell in rest.split("|")]
            yield (ranks, OPS[kind], *map(int, shape)), cells


def test_the_table_of_strategies_is_what_was_measured():
    found, rows = comparisons(), dict(stated())
    assert rows.keys() == found.keys()
    for key, cells in rows.items():
        of, best = found[key], found[key]["rows"][0]
        values = [of["serial_ms"]["value"], best["time_ms"]["value"]]
        assert [float(cells[0]), float(cells[2])] == pytest.approx(values, abs=0.0006), key
        assert cells[1] == best["family"], key
        assert float(cells[3]) == pytest.approx(best["efficiency"]["value"], abs=0.006), key
        assert float(cells[4]) == pytest.approx(best["efficiency_of_own_bound"]["value"], abs=0.006), key


def test_no_strategy_is_above_a_bound_of_its_own():
    for of in comparisons().values():
        for row in of["rows"]:
            assert (row["share_of_pipeline_bound"] or 0) <= 1
            assert row["time_over_own_bound"] >= 1
