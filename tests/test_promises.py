"""Every promise on the page of promises names tests and trials that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "promises.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| promise")
]


def places(cell: str) -> list[str]:
    return re.findall(r"`((?:tests|benchmarks|docs|scripts)/[^`]*)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_promise_names_tests_that_exist(row: list[str]) -> None:
    promise, cell = row
    assert promise
    named = places(cell)
    assert named, f"no test of {promise!r}"
    for place in named:
        path, _, test = place.partition("::")
        assert (ROOT / path).exists(), place
        assert not test or f"def {test}(" in (ROOT / path).read_text(), place


def test_every_trial_of_reliability_stands_behind_a_promise() -> None:
    trials = {path.name for path in (ROOT / "benchmarks" / "reliability").glob("*.py")}
    trials -= {"hang_cases.py", "faulty_training.py"}  # what the trials run
    cells = " ".join(cell for _, cell in ROWS)
    assert not {name for name in trials if f"benchmarks/reliability/{name}" not in cells}
