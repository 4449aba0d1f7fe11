"""Report the overlap of communication and compute of one or more runs, and compare two of them.

The same as `aorta report` and `aorta compare`, for a checkout that is not installed:

    python analysis/overlap_report.py --log-dir DIR --label NAME [more pairs] --output OUT
        [--reference NAME --candidate NAME] [--budget budget.yaml]

Exit status: 0 when the report was written and every limit of the budget is met, 1 when a limit is
violated, 2 when no report could be made (nothing is written then), 3 when none is violated but one
cannot be judged.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

try:
    import click
    import msgspec  # noqa: F401
    import numpy  # noqa: F401

    from aorta.cli.options import PATH, file_options, label_option, output_option, report_options
    from aorta.cli.report import write_and_print
    from aorta.command_line import OneLineCommand
except ModuleNotFoundError as missing:
    sys.exit(f"overlap_report: {missing.name} is not installed; try: {sys.executable} -m pip install {ROOT}")


@click.command("overlap_report", cls=OneLineCommand)
@click.option(
    "--log-dir", multiple=True, required=True, type=PATH, help="Folder of a run, or traces; may repeat."
)
@label_option(required=True)
@output_option(required=True, help="Folder of the report.")
@click.option("--reference", metavar="NAME", help="Compare with this label (of two: the first).")
@click.option("--candidate", metavar="NAME", help="Compare this label (of two: the other).")
@report_options
@file_options(by_default=True)
def main(
    log_dir: tuple[Path, ...],
    label: tuple[str, ...],
    output: Path,
    reference: str | None,
    candidate: str | None,
    **options: Any,
) -> int:
    """Report the overlap of communication and compute of runs, and compare two of them.

    The same name given to several runs: they are runs of the same, judged together. Exit status: 0 written,
    and every limit met; 1 a limit is violated; 2 no report could be made; 3 a limit cannot be judged.
    """
    return write_and_print(log_dir, label, output, sides=(reference, candidate), **options)


if __name__ == "__main__":
    main()
