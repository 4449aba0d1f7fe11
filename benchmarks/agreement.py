"""Whether every output says the same of recorded runs and traces: step, causes and their order. On a CPU.

    python benchmarks/agreement.py FOLDER_OR_FILE ...      1 to 10 s an input

Takes each run below the folders (run.json with lines beside it), archives of one (.tgz) and traces that are
named, or all of AORTA_DATA where none is. Report, why, page and summary.json have to agree; parts add up to
the step and to the run's wall time within 0.1 %, and no sentence says what cannot be
(tests/why/causes/statements.py). What aorta refuses with one line is counted apart. Exit status 1 where
anything is found.
"""

import sys
import tarfile
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, data_folder, write

sys.path.insert(0, str(ROOT))

from aorta.errors import AortaError
from tests.why.causes.statements import disagreements, outputs, title


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("inputs", nargs="*", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument(
        "--texts", type=Path, metavar="FOLDER", help="where what `why` and `report` print goes"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in found(options.inputs or of_data(), Path(folder)):
            rows.append(row := looked_at(path, options.texts))
            print(f"{path}: {row['what']}  {row['says']}", flush=True)
    faults, refused = (sum(row["what"] == what for row in rows) for what in ("fault", "refused"))
    print(
        f"{len(rows) - faults - refused} of {len(rows)} agree, {refused} are refused, {faults} have a fault"
    )
    write(options.output, rows)
    return int(faults > 0)


def of_data() -> list[Path]:
    folders = (data_folder() / name for name in ("traces", "traces_foreign", "runs"))
    return [path for folder in folders for path in sorted(folder.iterdir()) if path.name != "README.md"]


def found(inputs: list[Path], unpacked: Path) -> Iterator[Path]:
    for path in inputs:
        if path.suffix == ".tgz":
            with tarfile.open(path) as archive:
                archive.extractall(unpacked, filter="data")
            yield unpacked / path.stem
        elif path.is_dir() and (runs := sorted(path.rglob("run.json"))):
            yield from (run.parent for run in runs)
        else:
            yield path


def looked_at(path: Path, texts: Path | None) -> dict[str, Any]:
    row: dict[str, Any] = {"input": str(path)}
    try:
        report, explained, why, printed = outputs(path)
        wrong = list(disagreements(report, explained, why, printed))
    except AortaError as error:
        return row | {"what": "refused", "says": str(error)}
    except Exception:
        return row | {"what": "fault", "says": traceback.format_exc()}
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
        name = "_".join(path.parts[-4:])
        (texts / f"{name}.txt").write_text(f"{printed}\n\n======== why\n\n{why}\n")
    return row | {"what": "fault" if wrong else "agrees", "says": " | ".join(wrong) or title(why)}


if __name__ == "__main__":
    sys.exit(main())
