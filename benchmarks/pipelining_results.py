"""What benchmarks/pipelining.py wrote, from its folder or packed into one small file.

    PYTHONPATH=. python benchmarks/pipelining_results.py FOLDER… benchmarks/results/pipelining_2xh200.json \
        --date 2026-11-20 --note "…"

Packed: times in steps of 0.1 us; timelines of rank 0 only; of a comparison without the alternatives that
were tried before its last rounds; one line per section. Runs of several folders with the same number
of queues become one.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

DIGITS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("file", type=Path)
    parser.add_argument("--date", required=True)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    runs = merged([run for folder in options.folders for run in runs_of(folder)])
    made = "benchmarks/pipelining.py, packed by benchmarks/pipelining_results.py"
    lines = ",\n".join(run_text(run) for run in runs)
    head = {"made": made, "date": options.date, "note": options.note, "ms": f"rounded to {DIGITS} digits"}
    text = msgspec.json.encode(head).decode()[:-1] + ',"runs":[\n' + lines + "\n]}\n"
    options.file.write_text(text)
    print(f"{options.file}: {len(text) / 1e3:.0f} kB, {len(runs)} runs")


def runs_of(path: Path) -> list[dict[str, Any]]:
    """One per number of hardware queues, fewest first; empty where there are none."""
    if path.is_file():
        found = msgspec.json.decode(path.read_bytes())["runs"]
    else:
        found = [msgspec.json.decode(file.read_bytes()) for file in sorted(path.glob("queues_*.json"))]
    return sorted(found, key=lambda run: run["queues"])


def merged(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One run per number of queues, with the sections of all."""
    found: dict[int, dict[str, Any]] = {}
    for run in runs:
        kept = found.setdefault(run["queues"], run | {key: [] for key in ("sections", "skipped", "failed")})
        for key in ("sections", "skipped", "failed"):
            kept[key] = kept[key] + run[key]
    return [found[queues] for queues in sorted(found)]


def trimmed(section: dict[str, Any]) -> dict[str, Any]:
    match section["name"]:
        case "strategies":
            left_out = ("screening_ms", "environment", "versions")
            kept = {key: value for key, value in section["comparison"].items() if key not in left_out}
            return section | {"comparison": kept}
        case "timelines":
            return section | {"of_rank": section["of_rank"][:1]}
    return section


def run_text(run: dict[str, Any]) -> str:
    """A run with each section on a line of its own, so that a difference can be read."""
    sections = ",\n".join(
        msgspec.json.encode(rounded(trimmed(section))).decode() for section in run["sections"]
    )
    rest = {key: value for key, value in run.items() if key != "sections"}
    return msgspec.json.encode(rest).decode()[:-1] + ',"sections":[\n' + sections + "\n]}"


def rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, DIGITS)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list():
            return [rounded(item) for item in value]
    return value


if __name__ == "__main__":
    main()
