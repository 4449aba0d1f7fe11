"""Report the overlap of communication and compute of one or more runs, and compare two of them.

The same as `aorta report` and `aorta compare`, for a checkout that is not installed:

    python analysis/overlap_report.py --log-dir DIR --label NAME [more pairs] --output OUT
        [--reference NAME --candidate NAME] [--budget budget.yaml]

Exit status: 0 when the report was written and every limit of the budget is met, 1 when a limit is
violated, 2 when no report could be made (nothing is written then), 3 when none is violated but one
cannot be judged.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

try:
    from aorta.causes.lines import causes_lines
    from aorta.cli.report import progress_bar
    from aorta.command_line import discard_output
    from aorta.errors import AortaError
    from aorta.exit_codes import INTERRUPTED
    from aorta.report.write import Outputs, write_report
    from aorta.traces.reading import Reading
    from aorta.traces.steps import StepRule
except ModuleNotFoundError as missing:
    sys.exit(f"overlap_report: {missing.name} is not installed; try: {sys.executable} -m pip install {ROOT}")


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    outputs = Outputs(
        pictures=args.pictures,
        page=args.page,
        perfetto=args.perfetto,
        parquet=args.parquet,
        budget=args.budget,
        junit=args.junit,
        markdown=args.markdown,
    )
    try:
        with progress_bar() as progress:
            written = write_report(
                args.log_dir,
                args.label,
                args.output,
                args.reference,
                args.candidate,
                warmup=args.warmup,
                jobs=args.jobs,
                dask=args.dask,
                progress=progress,
                reading=Reading(
                    cache=args.cache, steps=StepRule(kernel=args.step_kernel, period=args.step_period)
                ),
                outputs=outputs,
                explain=causes_lines,
            )
    except AortaError as error:
        print(f"overlap_report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        print(written.text, flush=True)
    except BrokenPipeError:
        discard_output()
    return written.exit_status


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as every other mistake; --help has the rest."""
        self.exit(2, f"{self.prog}: {message} (--help lists every option)\n")


def parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="overlap_report",
        description="Report the overlap of communication and compute of runs, and compare two of them.",
        epilog="exit status: 0 written, and every limit met; 1 a limit is violated;"
        " 2 no report could be made; 3 a limit cannot be judged",
    )
    parser.add_argument(
        "--log-dir",
        action="append",
        default=[],
        required=True,
        help="folder of rank_<n>_metrics.jsonl, or traces",
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        required=True,
        help="name of the run, in the same order; the same name again: another run of the same",
    )
    parser.add_argument("--output", required=True, help="folder for everything that is written")
    parser.add_argument("--reference", help="label to compare against (two labels: the first)")
    parser.add_argument("--candidate", help="label that is compared (two labels: the other)")
    parser.add_argument("--warmup", type=_count, help="steps to leave out of each run, instead of the rule")
    gate = parser.add_argument_group("gate")
    gate.add_argument("--budget", help="YAML file of limits, such as 'exposed_ms: {max: 12.0}'")
    gate.add_argument("--junit", help="JUnit XML of the budget, for CI")
    gate.add_argument("--markdown", help="summary of the comparison and the budget, for CI")
    scale = parser.add_argument_group("scale")
    scale.add_argument(
        "--jobs",
        type=_at_least_one,
        help="processes that read ranks (one per core for much to read)",
    )
    scale.add_argument("--dask", help="address of a dask scheduler that reads ranks, such as tcp://host:8786")
    traces = parser.add_argument_group("traces that mark no steps, or are read again")
    traces.add_argument(
        "--step-kernel", metavar="NAME", help="a step begins where a kernel of this name does"
    )
    traces.add_argument(
        "--step-period",
        type=_at_least_one,
        metavar="N",
        help="kernels of the compute stream in a step; with --step-kernel, every how many of it a step begins"
        " (left out: what repeats clearly)",
    )
    traces.add_argument(
        "--no-cache", dest="cache", action="store_false", help="neither use nor fill the cache of read traces"
    )
    for name, what in (
        ("pictures", "{label}_timeline.png and comparison.png"),
        ("page", "report.html"),
        ("perfetto", "{label}.perfetto.json.gz"),
        ("parquet", "steps.parquet"),
    ):
        parser.add_argument(f"--no-{name}", dest=name, action="store_false", help=f"leave out {what}")
    return parser


def _count(text: str) -> int:
    return _whole(text, 0)


def _at_least_one(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
