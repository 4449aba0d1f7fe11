"""Report the overlap of communication and compute of one or more runs.

    python analysis/overlap_report.py --log-dir DIR --label NAME [more pairs] --output OUT
        [--reference NAME --candidate NAME] [--warmup STEPS]

Exit status: 0 when the report was written, 2 when it could not be made (nothing is written then).
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

from aorta.errors import AortaError  # noqa: E402
from aorta.report.write import write_report  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        print(
            write_report(
                args.log_dir, args.label, args.output, args.reference, args.candidate, warmup=args.warmup
            )
        )
    except AortaError as error:
        print(f"overlap_report: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap_report", description="Report the overlap of communication and compute of runs."
    )
    parser.add_argument(
        "--log-dir", action="append", default=[], required=True, help="folder of rank_<n>_metrics.jsonl"
    )
    parser.add_argument(
        "--label", action="append", default=[], required=True, help="name of the run, in the same order"
    )
    parser.add_argument("--output", required=True, help="folder for summary.json and the pictures")
    parser.add_argument("--reference", help="label to compare against (two runs: the first)")
    parser.add_argument("--candidate", help="label that is compared (two runs: the other)")
    parser.add_argument("--warmup", type=_count, help="steps to leave out, instead of the rule")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


if __name__ == "__main__":
    sys.exit(main())
