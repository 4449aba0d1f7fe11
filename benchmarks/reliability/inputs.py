"""Spoilt and damaged inputs: each gives a number, a warning or one line, never a traceback.

    python benchmarks/reliability/inputs.py [GROUP...] [-k WORD] [--output inputs.csv]

Groups: spoilt (every field of a good trace, record or table takes every wrong value, wrong bytes, wrong
files) and damage (lines of records missing, twice, exchanged,
changed, foreign). Each is read by `aorta report` in a forked process with limits of 1 GB above what the
program takes by itself and 5 s of CPU. Exit status 1 where one is wrong.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from harness import arguments, write  # noqa: E402
from reliability.limited import Input, ended  # noqa: E402
from reliability.spoilt_inputs import damaged_records, spoilt_inputs  # noqa: E402

GROUPS = {"spoilt": spoilt_inputs, "damage": damaged_records}
KINDS = ("number", "warning", "one line", "FAILED")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("group", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all where none")
    parser.add_argument("-k", dest="word", default="", help="only inputs with this word")
    options = parser.parse_args()
    if unknown := set(options.group) - set(GROUPS):
        parser.error(f"no group {', '.join(sorted(unknown))}: {', '.join(GROUPS)}")
    started_s, rows = time.perf_counter(), []
    for group in options.group or GROUPS:
        for given in GROUPS[group]():
            if options.word in f"{given.group} {given.name}":
                rows.append(row_of(given))
                if rows[-1]["wrong"] or options.word:
                    print(*rows[-1].values(), sep="  ", flush=True)
    show(rows)
    num_wrong = sum(row["wrong"] is not None for row in rows)
    print(f"{len(rows)} inputs, {num_wrong} wrong, {time.perf_counter() - started_s:.0f} s")
    write(options.output, rows)
    return 1 if num_wrong else 0


def row_of(given: Input) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        end = ended(given.make(folder))
        wrong = given.wrong(end, folder)
        text = end.first_line.replace(name, "PLACE")[:160]
    return {
        "group": given.group, "name": given.name, "gives": end.verdict, "wrong": wrong, "text": text,
        "status": end.status, "cpu_s": round(end.cpu_s, 2), "peak_mb": round(end.peak_mb),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    counts = Counter((row["group"], row["gives"]) for row in rows)
    print("| group | inputs | number | number and warning | one line | failed | most CPU s | most MB |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for group in dict.fromkeys(row["group"] for row in rows):
        members = [row for row in rows if row["group"] == group]
        cells = " | ".join(str(counts[group, kind]) for kind in KINDS)
        most = f"{max(row['cpu_s'] for row in members):.1f} | {max(row['peak_mb'] for row in members)}"
        print(f"| {group} | {len(members)} | {cells} | {most} |")


if __name__ == "__main__":
    sys.exit(main())
