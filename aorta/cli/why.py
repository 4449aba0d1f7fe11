"""aorta why."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aorta.cli.choice import rank_set, step_span
from aorta.errors import ReportError
from aorta.exit_codes import FINE
from aorta.records.files import STEPS_FILES

if TYPE_CHECKING:
    from aorta.report.model import Run

PATH = click.Path(path_type=Path)


@click.command("why")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option(
    "--if",
    "changes",
    multiple=True,
    metavar="CHANGE",
    help="Replay the traced step with a change, such as 'all_gather x0.5'; may be given several times.",
)
@click.option("--steps", metavar="FIRST:LAST", help="Judge these global steps alone, LAST included.")
@click.option("--ranks", metavar="0,1,4-7", help="Judge these ranks alone.")
@click.option(
    "--warmup", type=click.IntRange(0), help="Steps to leave out at the start, instead of the rule."
)
@click.option("--json", "as_json", is_flag=True, help="Print the causes as JSON.")
def why_command(
    runs: tuple[Path, ...],
    changes: tuple[str, ...],
    steps: str | None,
    ranks: str | None,
    warmup: int | None,
    as_json: bool,
) -> int:
    """Why a step of RUN is as long as it is, and what would help.

    RUN is the folder of a run, or traces of all its ranks. At most five causes, the largest first: each with
    milliseconds, evidence, the setting to change and a command that checks it.
    """
    if not _is_run(runs):
        from aorta.cli.why_traces import why_traces

        return why_traces(runs, changes, steps, ranks, as_json)
    if len(runs) > 1:
        raise ReportError(f"aorta why takes one run, got {len(runs)}; aorta compare takes two")
    if changes:
        return _replay_traces_of(runs[0], changes, steps, ranks, as_json)
    return _why_records(runs[0], steps, ranks, warmup, as_json)


def _is_run(paths: tuple[Path, ...]) -> bool:
    """Whether the first is a folder with records; what cannot be read is for the loader to say."""
    path = paths[0]
    try:
        return not path.exists() or (path.is_dir() and any(path.glob(STEPS_FILES)))
    except OSError:
        return True


def _replay_traces_of(
    run: Path, changes: tuple[str, ...], steps: str | None, ranks: str | None, as_json: bool
) -> int:
    traces = run / "torch_profiler"
    if not traces.is_dir():
        raise ReportError(
            f"--if replays a traced step, and {run} holds no traces (torch_profiler/): trace one with"
            f" 'aorta capture {run}' while it runs, or profiling.enabled=true"
        )
    from aorta.cli.why_traces import why_traces

    return why_traces((traces,), changes, steps, ranks, as_json, _untraced_quartiles_ms(run))


def _untraced_quartiles_ms(path: Path) -> tuple[float, float, float] | None:
    """Quartiles, the median between them, of the steps of the run's records, in which steps that a profiler
    slowed down are left out."""
    import numpy as np

    from aorta.report.judge.judged import judge
    from aorta.report.load.open import load_run

    judged = judge(load_run(path, "run", jobs=None), None)
    step_ms = judged.run.metrics["step_ms"][:, judged.num_warmup :]
    median_ms = judged.statistics["step_ms"].median
    if median_ms is None or median_ms != median_ms:
        return None
    low, high = np.nanpercentile(step_ms, (25, 75))
    return min(float(low), median_ms), median_ms, max(float(high), median_ms)


def _why_records(path: Path, steps: str | None, ranks: str | None, warmup: int | None, as_json: bool) -> int:
    from aorta.causes.rank import causes_of
    from aorta.causes.run_text import causes_text, nothing_text
    from aorta.report.judge.judged import dataset, judge
    from aorta.report.judge.leading import settled
    from aorta.report.load.open import load_run

    label = path.resolve().name or "run"
    run = load_run(path, label, jobs=None)
    judged = judge(_chosen(run, step_span(steps), rank_set(ranks)), 0 if steps and warmup is None else warmup)
    settled_dataset = settled({label: dataset(label, [judged])})[label]
    causes = causes_of(settled_dataset, str(path))
    if as_json:
        import msgspec

        answer = {
            "run": str(path),
            "step_ms": settled_dataset.statistics["step_ms"].median,
            "num_steps": judged.num_steps,
            "ranks": judged.run.ranks,
            "source": settled_dataset.source,
            "causes": causes,
            "nothing": None if causes else nothing_text(settled_dataset),
            "notes": judged.run.notes,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
    else:
        click.echo(causes_text(causes, settled_dataset))
    return FINE


def _chosen(run: "Run", steps: tuple[int, int] | None, ranks: set[int] | None) -> "Run":
    """The run with some of its steps and ranks alone."""
    if steps is None and ranks is None:
        return run
    from aorta.causes.selection import selected

    return selected(run, steps, ranks)
