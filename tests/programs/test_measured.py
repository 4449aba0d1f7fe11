"""docs/programs.md states what benchmarks/results holds."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "programs.md"


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


def test_copies_by_copy_engines_were_the_best_as_stated():
    found = [(of["serial_ms"]["value"], of["rows"][0]) for of in comparisons().values()]
    assert len(found) == 11
    assert all(best["family"].startswith("copy engine") for _, best in found)
    parts = [best["time_ms"]["value"] / serial_ms for serial_ms, best in found]
    said = f"the best in all eleven shapes, at {min(parts):.2f} to {max(parts):.2f} of the serial time"
    assert said in " ".join(DOCUMENT.read_text(encoding="utf-8").split())


def test_no_strategy_is_above_a_bound_of_its_own():
    for of in comparisons().values():
        for row in of["rows"]:
            assert (row["share_of_pipeline_bound"] or 0) <= 1
            assert row["time_over_own_bound"] >= 1
