"""Table of what on_gpus.sh wrote: python benchmarks/hazards/summary.py OUT. Writes OUT/summary.csv too."""

import csv
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

LOSSES = re.compile(r"losses (\w+) step_ms ([\d.]+)")
CSAN = re.compile(r"csan_ms ([\d.]+) (alarms \d+ in \d+ steps)")


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def found(out: Path, name: str) -> dict[str, Any]:
    """What a run with the check printed: findings by status, checked steps, losses' digest."""
    text, rc = text_of(out / f"{name}.txt"), text_of(out / f"{name}.rc").strip()
    losses = LOSSES.search(text)
    row: dict[str, Any] = {"name": name, "rc": rc, "losses": losses[1] if losses else ""}
    row["step_ms"] = float(losses[2]) if losses else None
    csan = CSAN.search(text)
    row["csan_ms"] = float(csan[1]) if csan else None
    if name.startswith("csan_"):
        ended = "CSAN detected" in text_of(out / f"{name}.err") and rc != "0"
        row["csan"] = csan[2] if csan else "ended by an alarm" if ended else "did not end well"
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
            f"losses {row['losses']} step_ms {row['step_ms']} {row.get('first', '')}"
        )
        bare = next((one["step_ms"] for one in rows if one["name"] == f"bare_{name}"), None)
        if "csan" in row:
            times = f", {row['csan_ms'] / row['step_ms']:.1f} times as long a step" if row["csan_ms"] else ""
            print(f"    CSAN: {row['csan']}{times}")
        elif bare and row["step_ms"]:  # beside other programs, with the ends of windows
            print(f"    all steps checked: {row['step_ms'] / bare:.1f} times as long a step")
        if row["rc"] not in ("0", "1"):
            print("    " + " / ".join(text_of(out / f"{name}.err").strip().splitlines()[-2:])[:300])
    with (out / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
