"""Table of what on_gpus.sh wrote: python benchmarks/hazards/summary.py OUT. Writes OUT/summary.csv too."""

import csv
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PARTS = re.compile(r"parts ([\d. ]+)")
LOSSES = re.compile(r"losses (\w+) step_ms ([\d.]+) csan (\d+)")


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def found(out: Path, name: str) -> dict[str, Any]:
    """What a run with the check printed: findings by status, checked steps, losses' digest."""
    text, rc = text_of(out / f"{name}.txt"), text_of(out / f"{name}.rc").strip()
    losses = LOSSES.search(text)
    row: dict[str, Any] = {"name": name, "rc": rc, "losses": losses[1] if losses else ""}
    row["step_ms"] = float(losses[2]) if losses else None
    parts = PARTS.search(text)
    row["parts"] = [float(part) for part in parts[1].split()] if parts else []
    row["csan"] = int(losses[3]) if losses else None
    start = text.find("[\n")
    if start >= 0:
        try:
            checked, _ = json.JSONDecoder().raw_decode(text[start:])
        except ValueError:
            return row
        row["steps"] = max((len(rank["steps"]) for rank in checked), default=0)
        row["operations"] = sum(rank["num_operations"] for rank in checked)
        statuses = Counter(f"{f['status']} {f['kind']}" for rank in checked for f in rank["findings"])
        row["findings"] = dict(statuses)
        row["first"] = next(
            (
                f"{f['later']['site']['operation']} {f['rule']} by {f['earlier']['site']['operation']}"
                for rank in checked
                for f in sorted(rank["findings"], key=lambda f: f["status"])
            ),
            "",
        )
    return row


def cost(parts: list[float]) -> str:
    """What two checked steps cost, from ms a step of programs.py's parts: the third has them and one more."""
    plain = (parts[0] + parts[3]) / 2
    checked = (3 * parts[2] - plain) / 2
    mean = 1 + 3 * (parts[2] - plain) / (200 * plain)
    return (
        f"plain {plain:.3f} ms ({parts[0]:.3f}, {parts[3]:.3f}), a checked step {checked:.1f} ms "
        f"({checked / plain:.1f} x), two of 200 {mean:.3f} x"
    )


def main() -> None:
    out = Path(sys.argv[1])
    print(text_of(out / "cases.txt"))
    print("CSAN on the cases (bad | mended: errors raised)")
    print(text_of(out / "cases_csan.txt"))
    rows = []
    names = sorted(path.stem for path in out.glob("*.rc") if not path.stem.startswith("cases"))
    for name in names:
        row = found(out, name)
        rows.append(row)
        print(
            f"{name:52} rc {row['rc']:>3} steps {row.get('steps', '-')!s:>3} {row.get('findings', '')!s:45} "
            f"losses {row['losses']} step_ms {row['step_ms']} csan {row['csan']} {row.get('first', '')}"
        )
        if row["parts"][1:]:
            print("    " + cost(row["parts"]))
        if row["rc"] not in ("0", "1"):
            print("    " + " / ".join(text_of(out / f"{name}.err").strip().splitlines()[-2:])[:300])
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
