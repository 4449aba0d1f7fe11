"""Train once per combination of settings and environment variables, and tell which is best.

    python scripts/sweep.py config/sweeps/fsdp_prefetch.yaml [--output DIR]

The same command again goes on where it was interrupted. What it leaves: sweep.json, which
scripts/analyze_sweep_results.py compares with another's, sweep.png, and the records of every trial.

Exit status: 0 when every trial was measured, 1 when some failed, 2 when the sweep cannot be run.
"""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import click  # noqa: E402
from rich.console import Console  # noqa: E402

from aorta.errors import AortaError  # noqa: E402
from aorta.hw_queue_eval.core.results import Point  # noqa: E402
from aorta.hw_queue_eval.core.trials import described, lead_of  # noqa: E402
from aorta.sweep.run import DOCUMENT, run_sweep  # noqa: E402
from aorta.sweep.show import answer, draw, note, number, table  # noqa: E402
from aorta.sweep.spec import load_spec  # noqa: E402


@click.command()
@click.argument("sweep", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="Folder; default artifacts/sweeps/<name>.")
@click.option("--retry-failed", is_flag=True, help="Run trials again that failed before.")
@click.option("--list", "only_list", is_flag=True, help="Say what would be run, and run nothing.")
def main(sweep: Path, output: Path | None, retry_failed: bool, only_list: bool) -> None:
    """Run the trials of SWEEP.yaml that are missing."""
    spec = load_spec(sweep)
    folder = output or Path("artifacts") / "sweeps" / spec.name
    if only_list:
        click.echo(f"{spec.num_trials()} trials ({spec.method}), {spec.ranks} ranks each, into {folder}")
        for configuration in spec.grid() if spec.method == "grid" else ():
            click.echo("  " + "  ".join(f"{name}={value}" for name, value in configuration.items()))
        return

    def told(done: int, total: int, point: Point, there: bool) -> None:
        # Its own numbers: whether all trials have such is known at the end.
        own = lead_of(spec.objective, [point])
        found = number(spec, point, own) if point.status == "measured" else point.reason
        known = " (before)" if there else ""
        click.echo(f"{done}/{total}  {spec.objective} {found}{known}  {described(point)}", err=True)

    document = run_sweep(spec, folder, told=told, retry_failed=retry_failed)
    click.echo(answer(spec, document.points))
    click.echo()
    Console().print(table(spec, document.points))
    if text := note(spec, document.points):
        click.echo(text)
    click.echo(f"wrote {folder / DOCUMENT}")
    click.echo(f"wrote {draw(spec, document.points, folder / 'sweep.png')}")
    sys.exit(0 if all(point.status == "measured" for point in document.points) else 1)


def _terminated(number: int, _: object) -> None:
    sys.exit(128 + number)  # by way of what ends the trial's processes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"sweep: {error.format_message()}", err=True)
        sys.exit(2)
    except AortaError as error:
        click.echo(f"sweep: {error}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("sweep: interrupted; the same command goes on from here", err=True)
        sys.exit(130)
