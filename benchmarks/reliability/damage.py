"""Planted damage of records: is each refused in one line or noted?

    python benchmarks/reliability/damage.py --output damage.csv

A run of two ranks and 30 steps is written with its columns, damaged in one way, and read as a report reads
it. Exit status 1 where a damage passes without a word, or raises anything but an error in one line.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, write  # noqa: E402

from aorta.account.load.open import load_run  # noqa: E402
from aorta.errors import AortaError  # noqa: E402
from aorta.records.files import steps_name  # noqa: E402
from aorta.records.reader import read_run, read_steps  # noqa: E402
from aorta.records.writer import LineWriter, RunFolder, write_json  # noqa: E402

EXAMPLE = ROOT / "docs" / "example" / "ddp"
Lines = list[bytes]


def made(folder: Path, run_id: str) -> Path:
    """The example's run as this version writes it."""
    run = read_run(EXAMPLE)
    run.run_id = run_id
    for rank in range(2):
        with RunFolder(folder, rank) as empty:
            if rank == 0:
                empty.write_run(run)
        path = folder / steps_name(rank)
        with LineWriter.append(path, with_columns=True) as writer:
            for record in read_steps(EXAMPLE / path.name, []):
                writer.write(msgspec.structs.replace(record, schema=2, run_id=run_id))
    return folder


def changed(lines: Lines, old: bytes, new: bytes) -> Lines:
    return [*lines[:7], lines[7].replace(old, new, 1), *lines[8:]]


OF_LINES: dict[str, Callable[[Lines, Lines], Lines]] = {
    "first ten lines gone": lambda a, b: a[10:],
    "ten lines gone": lambda a, b: [*a[:10], *a[20:]],
    "last ten lines gone": lambda a, b: a[:-10],
    "every other line gone": lambda a, b: a[::2],
    "a line twice": lambda a, b: [*a[:5], a[4], *a[5:]],
    "all lines twice": lambda a, b: a + a,
    "two lines exchanged": lambda a, b: [*a[:5], a[6], a[5], *a[7:]],
    "reversed": lambda a, b: a[::-1],
    "last line cut": lambda a, b: [*a[:-1], a[-1][:100]],
    "a line cut in the middle": lambda a, b: [*a[:9], a[9][:100] + b"\n", *a[10:]],
    "second half of another run": lambda a, b: [*a[:15], *b[15:]],
    "another run's rank": lambda a, b: b,
    "the other rank's lines": lambda a, b: [line.replace(b'"rank":0', b'"rank":1') for line in a],
    "a number changed": lambda a, b: changed(a, b'"tokens":256', b'"tokens":255'),
    "negative tokens": lambda a, b: changed(a, b'"tokens":256', b'"tokens":-25'),
    "a bit of a time flipped": lambda a, b: changed(a, b'"comm_ms":', b'"comm_mr":'),
    "step time zeroed": lambda a, b: changed(a, b'"step_ms":', b'"step_ms":0'),
    "NUL in the middle": lambda a, b: [*a[:9], a[9].replace(b",", b"\0", 1), *a[10:]],
    "not UTF-8": lambda a, b: changed(a, b'"host"', b'"h\xffst"'),
    "empty": lambda a, b: [],
}


def main() -> int:
    parser = arguments(__doc__)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        other = made(Path(name) / "other", "another")
        foreign = (other / "rank_0_metrics.jsonl").read_bytes().splitlines(keepends=True)
        for number, (what, damage) in enumerate(OF_LINES.items()):
            folder = made(Path(name) / str(number), "one")
            path = folder / "rank_0_metrics.jsonl"
            path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True), foreign)))
            rows.append(outcome(what, folder))
        folder = made(Path(name) / "lost", "one")
        run = read_run(folder)
        run.coverage["lost_lines"] = 7
        write_json(folder / "run.json", run)
        rows.append(outcome("lost_lines: 7", folder))
        folder = made(Path(name) / "alien", "one")
        (other / "run.json").replace(folder / "run.json")
        rows.append(outcome("run.json of another run", folder))
        good = load_run(made(Path(name) / "good", "one"), "good")
        plain = {*good.notes, *good.story}
    for row in rows:
        row["noticed"] = row["how"] == "refused" or bool(set(row["words"]) - plain)
        print(f"{row['what']:32}{row['how']:10}{'' if row['noticed'] else 'NOT NOTICED  '}{row['words'][:1]}")
    num = sum(bool(row["noticed"]) for row in rows)
    print(f"{num} of {len(rows)} noticed")
    write(options.output, rows)
    return 0 if num == len(rows) else 1


def outcome(what: str, folder: Path) -> dict[str, Any]:
    try:
        run = load_run(folder, "damaged")
    except AortaError as error:
        return {"what": what, "how": "refused", "words": [str(error).replace(str(folder), "RUN")]}
    words = [text.replace(str(folder), "RUN") for text in (*run.story, *run.notes)]
    return {"what": what, "how": "read", "words": words}


if __name__ == "__main__":
    sys.exit(main())
