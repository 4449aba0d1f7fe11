"""`aorta sweep`: run the trials that are missing, print the best and the table of all."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console

from aorta.account.results.leading import described, lead_of
from aorta.account.results.schema import Point, to_json
from aorta.errors import FINE, VIOLATED
from aorta.sweep.show import answer, draw, note, number, table
from aorta.sweep.spec import SweepSpec, check_spec, load_spec
from aorta.sweep.trials import DOCUMENT, run_sweep


def sweep(
    path: Path,
    output: Path | None,
    retry_failed: bool,
    only_list: bool,
    as_json: bool = False,
    settings: tuple[str, ...] = (),
) -> int:
    """Run the trials of a sweep that are missing, print the answer, and return the exit status.

    settings: KEY=VALUE for all trials, on top of the file's overrides.
    """
    spec = load_spec(path)
    if settings:
        spec = msgspec.structs.replace(spec, overrides=[*spec.overrides, *settings])
        check_spec(spec, str(path))
    with ended_by_sigterm(), goes_on_later():
        return _sweep(spec, output, retry_failed, only_list, as_json)


def _sweep(spec: SweepSpec, output: Path | None, retry_failed: bool, only_list: bool, as_json: bool) -> int:
    folder = output or Path("artifacts") / "sweeps" / spec.name
    if only_list and as_json:
        trials = [*spec.grid()] if spec.method == "grid" else None
        document_of_trials = {"num_trials": spec.num_trials(), "folder": str(folder), "trials": trials}
        click.echo(to_json(document_of_trials).decode())
        return FINE
    if only_list:
        click.echo(f"{spec.num_trials()} trials ({spec.method}), {spec.ranks} ranks each, into {folder}")
        for configuration in spec.grid() if spec.method == "grid" else ():
            click.echo("  " + "  ".join(f"{name}={value}" for name, value in configuration.items()))
        return FINE

    def print_trial(num_done: int, total: int, point: Point, is_earlier: bool) -> None:
        # Shown in this trial's own kind of number: only at the end it is known which kind all trials have.
        trial_lead = lead_of(spec.objective, [point])
        result = number(spec, point, trial_lead) if point.status == "measured" else point.reason
        earlier_text = " (from an earlier run)" if is_earlier else ""
        click.echo(
            f"{num_done}/{total}  {spec.objective} {result}{earlier_text}  {described(point)}", err=True
        )

    document = run_sweep(spec, folder, on_trial=print_trial, retry_failed=retry_failed)
    exit_code = FINE if all(point.status == "measured" for point in document.points) else VIOLATED
    if as_json:
        click.echo(to_json(document).decode())
        return exit_code
    click.echo(answer(spec, document.points))
    click.echo()
    Console().print(table(spec, document.points))
    if text := note(spec, document.points):
        click.echo(text)
    click.echo(f"wrote {folder / DOCUMENT}")
    click.echo(f"wrote {draw(spec, document.points, folder / 'sweep.png')}")
    return exit_code


@contextmanager
def goes_on_later() -> Iterator[None]:
    """Context that tells the user, on Ctrl-C, that finished trials are kept."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("sweep: interrupted; run the same command again to continue", err=True)
        raise


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context that raises SystemExit on SIGTERM, so that a trial's processes are ended on the way out."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
