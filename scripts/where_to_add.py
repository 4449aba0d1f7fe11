"""The table "Where to add" of CONTRIBUTING.md against grep: python scripts/where_to_add.py [--markdown]

For each task: files that the table names, files below aorta, tests and docs that hold the nearest example's
name, and which of the table's grep does not find.
"""

import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEARCHED = ("aorta", "tests", "docs")
SUFFIXES = frozenset({".py", ".yaml", ".md", ".js"})
PATH = re.compile(r"`((?:aorta|tests|docs|scripts)/[^`]*)`")


@dataclass(frozen=True)
class Task:
    """A row of the table."""

    name: str
    paths: list[str]
    example: str


def tasks(page: str) -> list[Task]:
    section = page.partition("## Where to add")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [
        Task(cells[0].strip(), PATH.findall(cells[1]), cells[2].strip().strip("`"))
        for cells in rows
        if len(cells) == 3 and "`" in cells[1]
    ]


def files_holding(text: str) -> list[str]:
    """As `grep -rlw` prints them, relative to the repository."""
    pattern = re.compile(rf"(?<!\w){re.escape(text)}(?!\w)")
    return [name for name, content in contents().items() if text in content and pattern.search(content)]


@cache
def contents() -> dict[str, str]:
    """Text of every file that is searched, by its name relative to the repository."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for folder in SEARCHED
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES and path.is_file()
    }


def missed(task: Task, held: list[str]) -> list[str]:
    """The table's files that grep does not find, a folder by any file below it."""
    return [path for path in task.paths if not any(f"{file}/".startswith(f"{path}/") for file in held)]


def main() -> None:
    markdown = "--markdown" in sys.argv
    if markdown:
        print("| task | files of the map | grep for | in aorta + tests + docs | of the map |")
        print("|---|---:|---|---:|---:|")
    for task in tasks((ROOT / "CONTRIBUTING.md").read_text()):
        held = files_holding(task.example)
        absent = missed(task, held)
        num_both = len(task.paths) - len(absent)
        if markdown:
            counts = " + ".join(str(sum(file.startswith(folder) for file in held)) for folder in SEARCHED)
            print(f"| {task.name} | {len(task.paths)} | `{task.example}` | {counts} | {num_both} |")
        else:
            print(
                f"{task.name}: {num_both} of {len(task.paths)} found by grep {task.example!r} in {len(held)}"
            )
            for path in absent:
                print(f"  map only: {path}")
            for file in held:
                if not any(f"{file}/".startswith(f"{path}/") for path in task.paths):
                    print(f"  grep only: {file}")


if __name__ == "__main__":
    main()
