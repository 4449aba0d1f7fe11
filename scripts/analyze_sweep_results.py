"""Two sweeps against each other, matched by configuration: a table, and a picture.

    python scripts/analyze_sweep_results.py --baseline sweep_v1.json --test sweep_v2.json \
        [--threshold 5%] [--plot comparison.png]

Exit status: 0 no regression, 1 a regression, 2 bad input, 3 when it cannot be told.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import click  # noqa: E402

from aorta.errors import BAD_INPUT, AortaError  # noqa: E402
from aorta.queues.cli.compare import compare_files, show_comparison  # noqa: E402
from aorta.queues.plots import draw_comparison  # noqa: E402

FILES = click.Path(path_type=Path)


@click.command()
@click.option("--baseline", "-b", required=True, multiple=True, type=FILES, help="Several: several runs.")
@click.option("--test", "-t", required=True, multiple=True, type=FILES)
@click.option("--threshold", default="5%", show_default=True)
@click.option("--any-device", is_flag=True, help="Judge results of different devices too.")
@click.option("--plot", type=FILES, default=Path("sweep_comparison.png"), show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace the picture.")
def main(
    baseline: tuple[Path, ...], test: tuple[Path, ...], threshold: str, any_device: bool, plot: Path,
    overwrite: bool,
) -> None:  # fmt: skip
    """Judge TEST against BASELINE."""
    found = compare_files(baseline, test, threshold, any_device)
    picture = draw_comparison(found, plot, overwrite)
    show_comparison(found)
    click.echo(f"wrote {picture}")
    sys.exit(found.exit_status)


def refuse(message: str) -> None:
    """Ends with one line for a mistake that a user can fix."""
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(BAD_INPUT)


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        refuse(error.format_message())
    except AortaError as error:
        refuse(str(error))
