"""The trials of a sweep one after another, into one document that is whole after each of them."""

import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aorta.errors import NOT_JSON, AortaError, ConfigError, RecordError
from aorta.records.reader import read_run
from aorta.records.schema import GPU_KINDS, QUEUE_LIMITS, DeviceKind, RunRecord
from aorta.records.writer import write_json
from aorta.report.model import Lead
from aorta.results.leading import lead_of, leading_metric
from aorta.results.schema import Document, Point, Setting, read_document, write_document
from aorta.sweep.spec import ChoiceRange, Scalar, SweepSpec
from aorta.sweep.trial import run_trial, trial_name

DOCUMENT, SPEC, TRIALS = "sweep.json", "spec.json", "trials"
MOST_REPEATED = 10
"""Proposals per trial that may repeat what was measured already."""

Told = Callable[[int, int, Point, bool], None]
"""Called with the number of a trial from 1, how many there are, the trial, whether it was there before."""
Runs = Callable[[SweepSpec, Mapping[str, Scalar], Path], Point]


def run_sweep(
    spec: SweepSpec,
    output: Path | str,
    *,
    told: Told | None = None,
    retry_failed: bool = False,
    run: Runs = run_trial,
) -> Document:
    """Run what is missing of the sweep in `output`, and return the whole.

    Trials that were measured there before are kept; RecordError where the folder holds another sweep.
    """
    folder = Path(output)
    measured = _open(spec, folder)
    if retry_failed:
        measured = {name: point for name, point in measured.items() if point.status == "measured"}
    points: dict[str, Point] = {}
    proposals = _grid(spec) if spec.method == "grid" else _optuna(spec)
    configuration = next(proposals, None)
    while configuration is not None:
        name = trial_name(configuration)
        earlier = points.get(name) or measured.get(name)
        point = earlier or run(spec, configuration, _new_folder(folder / TRIALS / name))
        is_new = name not in points
        points[name] = point
        if is_new:
            _write(folder, {**measured, **points})
            if told is not None:
                told(len(points), spec.num_trials(), point, earlier is not None)
        configuration = _next(proposals, point)
    return read_document(folder / DOCUMENT)


# ---- which trials ------------------------------------------------------------------------------

Proposals = Generator[dict[str, Scalar], Point, None]
"""Of configurations; each is answered with what came of it."""


def _next(proposals: Proposals, point: Point) -> dict[str, Scalar] | None:
    try:
        return proposals.send(point)
    except StopIteration:
        return None


def _grid(spec: SweepSpec) -> Proposals:
    yield from spec.grid()


def _optuna(spec: SweepSpec) -> Proposals:
    """Optuna's proposals; takes back what came of each. Those that were measured before cost nothing, and
    the same seed proposes the same again, so that a sweep goes on where it was interrupted."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("method: optuna needs the package optuna: install aorta[sweep]") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    direction = "maximize" if spec.maximizes() else "minimize"
    sampler = optuna.samplers.TPESampler(seed=spec.seed)
    study = optuna.create_study(direction=direction, sampler=sampler)
    finished: list[tuple[Any, Point]] = []
    lead = lead_of(spec.objective, [])
    names: set[str] = set()
    for _ in range(spec.trials * MOST_REPEATED):
        trial = study.ask()
        configuration = {name: _suggest(trial, name, choice) for name, choice in spec.choices().items()}
        point: Point = yield configuration
        finished.append((trial, point))
        previous, lead = lead, lead_of(spec.objective, [point for _, point in finished])
        if lead == previous:
            study.tell(trial, **_outcome(optuna, spec, point, lead))
        else:
            # What it learned is of the other kind of number, and cannot be leading_metric back: told anew.
            study = optuna.create_study(direction=direction, sampler=sampler)
            study.add_trials(
                optuna.trial.create_trial(
                    params=trial_number.params, distributions=trial_number.distributions,
                    **_outcome(optuna, spec, finished_point, lead),
                )
                for trial_number, finished_point in finished
            )  # fmt: skip
        names.add(trial_name(configuration))
        if len(names) == spec.trials:
            return


def _outcome(optuna: Any, spec: SweepSpec, point: Point, lead: Lead) -> dict[str, Any]:
    """Outcome of a trial, in optuna's words."""
    if point.status == "measured":
        return {"values": [leading_metric(point, spec.objective, lead).value]}
    return {"state": optuna.trial.TrialState.FAIL}


def _suggest(trial: Any, name: str, choice: "list[Scalar] | ChoiceRange") -> Scalar:
    value: Scalar
    if isinstance(choice, list):
        value = trial.suggest_categorical(name, choice)
    elif isinstance(choice.low, int) and isinstance(choice.high, int) and not isinstance(choice.step, float):
        value = trial.suggest_int(name, choice.low, choice.high, step=choice.step or 1, log=choice.log)
    else:
        value = trial.suggest_float(name, choice.low, choice.high, step=choice.step, log=choice.log)
    return value


# ---- the folder --------------------------------------------------------------------------------


def _open(spec: SweepSpec, folder: Path) -> dict[str, Point]:
    """Trials that the folder holds, by name."""
    mine = msgspec.to_builtins(spec)
    path = folder / SPEC
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is no folder; give another --output")
    if path.exists():
        try:
            document = msgspec.json.decode(path.read_bytes())
        except (OSError, *NOT_JSON) as error:
            raise RecordError(f"{path} cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise RecordError(f"{path} is not what a sweep was made from; give another --output")
        # More trials of the same is going on with it.
        changed = [
            key for key in mine if key not in ("trials", "timeout_s") and document.get(key) != mine[key]
        ]
        if changed:
            raise RecordError(
                f"{folder} holds a sweep with another {changed[0]}; give another --output to start afresh"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise RecordError(f"{folder} is not empty and holds no sweep; give another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, mine)
    except OSError as error:
        raise RecordError(f"cannot write {folder}: {error.strerror}") from None
    if not (folder / DOCUMENT).exists():
        return {}
    return {trial_name(p.configuration): p for p in read_document(folder / DOCUMENT).points}  # type: ignore[arg-type]


def _new_folder(folder: Path) -> Path:
    """Makes the trial's folder; what an interrupted trial left is kept beside."""
    if folder.exists():
        number = 1
        while (aside := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
            number += 1
        folder.rename(aside)
    return folder


def _write(folder: Path, points: Mapping[str, Point]) -> None:
    document = Document(
        kind="training",
        created_unix_ns=time.time_ns(),
        setting=_setting(folder, points),
        points=list(points.values()),
    )
    write_document(folder / DOCUMENT, document, overwrite=True)


def _setting(folder: Path, points: Mapping[str, Point]) -> Setting:
    """Setting of the first trial that was measured; what is swept is in the points."""
    for name, point in points.items():
        if point.status == "measured":
            try:
                run = read_run(folder / TRIALS / name)
            except AortaError as error:
                print(f"sweep: {error}", file=sys.stderr)
                continue
            return _setting_of(run, {n for p in points.values() for n in p.configuration})
    return Setting(
        platform="cpu", devices=[], world_size=1, backend=None, versions={}, environment={},
        queues="not known: no trial was measured",
    )  # fmt: skip


def _setting_of(run: RunRecord, swept: set[str]) -> Setting:
    device_kind = run.devices[0].get("kind") if run.devices else None
    kind: DeviceKind = device_kind if device_kind is not None and device_kind in GPU_KINDS else "cpu"
    limit = QUEUE_LIMITS.get(kind)
    if limit is None:
        queues = "none: no GPU"
    elif f"env.{limit}" in swept:
        queues = f"{limit} is swept"
    else:
        queues = f"{limit}={run.environment[limit]}" if limit in run.environment else f"{limit} is not set"
    return Setting(
        platform=kind,
        devices=run.devices,
        world_size=run.world_size,
        backend="gloo" if kind == "cpu" else "nccl",
        versions=run.versions,
        environment={n: v for n, v in run.environment.items() if f"env.{n}" not in swept},
        queues=queues,
    )
