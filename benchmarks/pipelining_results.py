"""What benchmarks/pipelining.py wrote, from its folder or packed into one small file.

    PYTHONPATH=. python benchmarks/pipelining_results.py FOLDER benchmarks/results/pipelining_2xh200.json \
        --date 2026-11-20 --note "…"

Packed: times in steps of 0.1 us, edge lists of graphs left out (their files hold them), one line per section.
"""

import argparse
from pathlib import Path
from typing import Any

import msgspec

DIGITS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--date", required=True)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    runs = runs_of(options.folder)
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


def run_text(run: dict[str, Any]) -> str:
    """A run with each section on a line of its own, so that a difference can be read."""
    sections = ",\n".join(msgspec.json.encode(rounded(section)).decode() for section in run["sections"])
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
