"""Does the change help that `aorta why` names? Programs are recorded, changed as told, and recorded again.

    python benchmarks/plants/remedies.py OUT                  all programs, on a CPU
    python benchmarks/plants/remedies.py OUT --cores 3        so many at a time as the machine has cores;
                                                              61 in 150 s on 48, with --repeats 1
    python benchmarks/plants/remedies.py OUT --only fused     by name, with commas between
    python benchmarks/plants/remedies.py OUT --device cuda    those of GPUs
    python benchmarks/plants/remedies.py OUT --repeats 5      three on a CPU and one on GPUs where not given

A program of scripts/remedies says in its docstring which cause it has and what it must be told; comments
`# ->` say what the line above them becomes (nothing: it goes). A remedy is right where it is told first and
the changed program is not told it again, in most repeats, and where the median step of the changed program
takes less time. The two run in turn, both under aorta, unless they are of inference, which aorta knows by its
traces; what a step takes is what they print.
tests/benchmarks/test_remedies.py says which remedies have no program, and why.
"""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "scripts" / "remedies"
SHARED = ("measured.py", "trainers.py", "trainers_lightning.py")
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import yaml  # noqa: E402


class Remedy(NamedTuple):
    name: str
    cause: str
    """Pattern of kinds."""
    told: str
    """Pattern of the remedy."""
    ranks: int
    device: str
    text: str
    """Of the program."""
    is_traced: bool
    """It infers: aorta reads the trace that it writes, behind the steps that it times."""
    library: str | None
    """That the program needs beside torch."""

    def changed(self) -> str:
        """The program with each line as the comments below it say."""
        lines: list[str] = []
        indent = None
        for line in self.text.splitlines(keepends=True):
            found = re.match(r"\s*# ->(?: (.*))?\n", line)
            if found is None:
                indent = None
                lines.append(line)
                continue
            if indent is None:  # of the line that it stands for
                former = lines.pop()
                indent = former[: len(former) - len(former.lstrip())]
            lines += [f"{indent}{found[1]}\n"] if found[1] else []
        return "".join(lines)


def remedies() -> dict[str, Remedy]:
    found = {}
    for path in sorted(PROGRAMS.glob("*.py")):
        text = path.read_text()
        head = text.split('"""')[1]
        if "# ->" in text:
            facts: dict[str, Any] = yaml.safe_load(head)
            found[path.stem] = Remedy(
                path.stem,
                facts["cause"],
                facts["told"],
                facts.get("ranks", 1),
                facts.get("device", "cpu"),
                text,
                facts.get("trace", False),
                facts.get("library"),
            )
    return found


def told_of(folder: Path, remedy: Remedy) -> tuple[str, str]:
    """Kind and remedy of the first cause of a run; without that of cores taken by this machine's other work,
    or that idle beside the one thread of the program, where the program is not about it."""
    from plants.judge import why

    causes = [
        one
        for one in why(folder)["causes"]
        if (one["kind"] != "core_taken" or "core_taken" in remedy.cause)
        and not ("OMP_NUM_THREADS" in one["change"] and "THREADS" not in remedy.told)
    ]
    first = causes[0] if causes else {"kind": "", "change": ""}
    return first["kind"], first["change"]


def main() -> int:
    from harness import arguments, machine, write
    from plants.judge import beside_each_other

    parser = arguments(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--only", default="", metavar="NAME,…")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cores", type=int, default=0, help="a program's own; 0: one at a time, on all")
    parser.add_argument("--repeats", type=int, default=0)
    options = parser.parse_args()
    repeats = options.repeats or (3 if options.device == "cpu" else 1)
    known = remedies()
    chosen = options.only.split(",") if options.only else [
        name for name, remedy in known.items() if remedy.device == options.device
    ]  # fmt: skip
    if options.device == "cpu":  # or aorta would record the GPUs of a machine that has some
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in [name for name in chosen if not _has_library(known[name])]:
        print(f"{name} is left out: no {known[name].library}", file=sys.stderr)
        chosen.remove(name)
    rows: list[dict[str, Any]] = []

    def tried(name: str) -> None:
        rows.append(_tried(known[name], options.out / name, repeats))

    beside_each_other(chosen, options.cores, tried)
    right = sum(row["told"] and row["helps"] and not row["told_again"] for row in rows)
    print(f"{right} of {len(rows)} remedies told, of use, and not told again; {machine()}")
    (options.out / "remedies.json").write_text(json.dumps(rows, indent=1))
    write(options.output, rows)
    return 0


def _has_library(remedy: Remedy) -> bool:
    return remedy.library is None or find_spec(remedy.library) is not None


def _tried(remedy: Remedy, out: Path, repeats: int) -> dict[str, Any]:
    """Record the program and the changed one in turn, and print what came out."""
    from plants.judge import launched, recorded, run

    variants = {"planted": remedy.text, "changed": remedy.changed()}
    took: dict[str, list[float | None]] = {name: [] for name in variants}
    told: dict[str, list[tuple[str, str]]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for variant, text in variants.items():
            program = out / str(repeat) / variant / "program"
            program.mkdir(parents=True, exist_ok=True)
            script = program / f"{remedy.name}.py"
            script.write_text(text)
            for shared in SHARED:
                (program / shared).write_text((PROGRAMS / shared).read_text())
            folder, command = out / str(repeat) / variant / "run", launched(remedy.ranks, [str(script)])
            if remedy.is_traced:
                folder.mkdir(exist_ok=True)
                command = ["env", f"PLANT_TRACE={folder}", *command]
            took[variant].append(run(command if remedy.is_traced else recorded(folder, command), remedy.name))
            told[variant].append(told_of(folder, remedy))
    num_told, num_again = (
        sum(
            re.search(remedy.told, change) is not None and re.fullmatch(remedy.cause, kind) is not None
            for kind, change in told[variant]
        )
        for variant in variants
    )
    ran = {name: [ms for ms in times if ms is not None] for name, times in took.items()}
    before_ms, after_ms = (median(times) if times else None for times in ran.values())
    helps = before_ms is not None and after_ms is not None and after_ms < before_ms
    is_sure = helps and max(ran["changed"]) < min(ran["planted"])
    is_told, is_again = 2 * num_told > repeats, 2 * num_again > repeats
    mark = "ok   " if is_told and helps and not is_again else "WRONG"
    text = (
        f"{mark} {remedy.name:18} {before_ms} -> {after_ms} ms a step{'' if is_sure else ', ranges meet'}; "
        f"told {num_told} of {repeats}, again {num_again}"
    )
    if num_told < repeats or num_again:
        text += f"\n      before: {told['planted']}\n      after: {told['changed']}"
    print(text, flush=True)
    return {
        "name": remedy.name, "told": is_told, "helps": helps, "sure": is_sure, "told_again": is_again,
        "num_told": num_told, "num_again": num_again, "repeats": repeats,
        "before_ms": before_ms, "after_ms": after_ms, "change": told["planted"][0][1],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
