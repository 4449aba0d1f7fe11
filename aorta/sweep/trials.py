"""The trials of a sweep: training runs in processes of their own, one after another.

run_sweep() does the trials that the folder lacks and writes sweep.json anew after each, so that a sweep can
be interrupted at any time and continued by the same call.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aorta.account.judge.judged import dataset, judge
from aorta.account.judge.leading import few_calibrated, has_any, metric_of, remarks, settled
from aorta.account.judge.timed_steps import values_where_timed
from aorta.account.load.open import load_run
from aorta.account.metrics import meaning
from aorta.account.model import Dataset, JudgedRun, Lead
from aorta.account.results.leading import (
    SOURCE,
    accuracies,
    calibrated,
    is_of_two_kinds,
    lead_of,
    leading_metric,
)
from aorta.account.results.schema import (
    Document,
    Interval,
    Metric,
    Point,
    Setting,
    read_document,
    write_document,
)
from aorta.command_line import module_environment
from aorta.errors import NOT_JSON, AortaError, ConfigError, RecordError
from aorta.launcher import RANK_VARIABLES
from aorta.records.reader import read_run
from aorta.records.schema import GPU_KINDS, QUEUE_LIMITS, DeviceKind, RunRecord
from aorta.records.writer import write_json
from aorta.sweep.spec import ENVIRONMENT, OUTPUT, ChoiceRange, Scalar, SweepSpec, override
from aorta.timeline.statistics import MIN_STEPS, estimate, side

METRICS = (
    "step_ms",
    "compute_ms",
    "comm_ms",
    "hidden_ms",
    "exposed_ms",
    "idle_ms",
    "overlap_ratio",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "mfu",
    "peak_memory_bytes",
    "power_w",
    "energy_per_token_mj",
)
"""Metrics that are kept of every trial beside the objective."""
DOCUMENT, SPEC, TRIALS = "sweep.json", "spec.json", "trials"
"""Names in the sweep's folder."""
MOST_REPEATED = 10
"""Proposals per trial, at most: optuna may propose again what was measured already."""
TRAIN = "aorta train"
"""Beginning of the line in which a training process reports a user's mistake."""
_GRACE_S = 45.0
"""Seconds that a trial has to end after SIGTERM. torchrun gives ranks deaf to it 30 s; they are in sessions
of their own, so that without torchrun nobody would end them."""
OnTrial = Callable[[int, int, Point, bool], None]
"""Callback of run_sweep: the number of a trial from 1, how many there are, the trial, True if it was there
before."""
Runs = Callable[[SweepSpec, Mapping[str, Scalar], Path], Point]
"""Function that does one trial, as run_trial does."""
Proposals = Generator[dict[str, Scalar], Point, None]
"""Generator of configurations; each is answered, by send(), with the trial that came of it."""


def run_sweep(
    spec: SweepSpec,
    output: Path | str,
    *,
    on_trial: OnTrial | None = None,
    retry_failed: bool = False,
    run: Runs | None = None,
) -> Document:
    """Run what is missing of the sweep in `output`, and return the whole.

    run: by default run_trial. Trials that were measured there before are kept; raises RecordError where the
    folder holds another sweep.
    """
    run = run or run_trial
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
        # A configuration that was proposed before is answered with the point of then.
        point = earlier or run(spec, configuration, _new_folder(folder / TRIALS / name))
        is_new = name not in points
        points[name] = point
        if is_new:
            _write(folder, {**measured, **points})
            if on_trial is not None:
                on_trial(len(points), spec.num_trials(), point, earlier is not None)
        configuration = _next(proposals, point)
    return read_document(folder / DOCUMENT)


# ---- which trials ------------------------------------------------------------------------------


def _next(proposals: Proposals, point: Point) -> dict[str, Scalar] | None:
    try:
        return proposals.send(point)
    except StopIteration:
        return None


def _grid(spec: SweepSpec) -> Proposals:
    yield from spec.grid()


def _optuna(spec: SweepSpec) -> Proposals:
    """Optuna's proposals.

    The same seed proposes the same again, and a proposal that was measured before costs nothing, so that a
    sweep goes on where it was interrupted.
    """
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
            # The study has learned from numbers of the other kind, and cannot forget them: a new one.
            study = optuna.create_study(direction=direction, sampler=sampler)
            study.add_trials(
                optuna.trial.create_trial(
                    params=earlier_trial.params, distributions=earlier_trial.distributions,
                    **_outcome(optuna, spec, earlier_point, lead),
                )
                for earlier_trial, earlier_point in finished
            )  # fmt: skip
        names.add(trial_name(configuration))
        if len(names) == spec.trials:
            return


def _outcome(optuna: Any, spec: SweepSpec, point: Point, lead: Lead) -> dict[str, Any]:
    """Keywords that tell optuna the outcome of a trial."""
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


# ---- the sweep's folder ------------------------------------------------------------------------


def _open(spec: SweepSpec, folder: Path) -> dict[str, Point]:
    """Trials that the folder holds, by name; the folder is made where there is none.

    Raises RecordError where it holds something else or cannot be written.
    """
    settings = msgspec.to_builtins(spec)
    path = folder / SPEC
    if folder.exists() and not folder.is_dir():
        raise RecordError(f"{folder} is not a folder; give another --output")
    if path.exists():
        try:
            document = msgspec.json.decode(path.read_bytes())
        except (OSError, *NOT_JSON) as error:
            raise RecordError(f"{path} cannot be read: {error}") from None
        if not isinstance(document, dict):
            raise RecordError(f"{path} is not what a sweep was made from; give another --output")
        # The same sweep with more trials, or more time for each, is a continuation.
        changed = [
            key
            for key in settings
            if key not in ("trials", "timeout_s") and document.get(key) != settings[key]
        ]
        if changed:
            raise RecordError(
                f"{folder} holds a sweep with another {changed[0]}; give another --output to start afresh"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise RecordError(f"{folder} is not empty and holds no sweep; give another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    except OSError as error:
        raise RecordError(f"cannot write {folder}: {error.strerror}") from None
    if not (folder / DOCUMENT).exists():
        return {}
    return {trial_name(p.configuration): p for p in read_document(folder / DOCUMENT).points}  # type: ignore[arg-type]


def _new_folder(folder: Path) -> Path:
    """Path for the trial's folder; one that an interrupted trial left is renamed and kept beside it."""
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
    """Setting of the first measured trial, without what is swept, which stands in the points."""
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


# ---- one trial ---------------------------------------------------------------------------------


def trial_name(configuration: Mapping[str, Scalar]) -> str:
    """Name of a trial's folder: the same configuration has the same one."""
    return hashlib.sha256(msgspec.json.encode(dict(configuration), order="deterministic")).hexdigest()[:12]


def run_trial(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
    """Train once, with records in the folder; a trial that fails is a point with the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    fault = _train(spec, configuration, folder)
    if fault is not None:
        return _failed(configuration, fault)
    return read_trial(spec, configuration, folder)


def _train(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> str | None:
    """Run the trial, its output in trial.log; return what went wrong, or None."""
    log = folder / "trial.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            trial_command(spec, configuration, folder),
            env=trial_environment(configuration),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the trial
        )
        try:
            status = process.wait(spec.timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"took longer than {spec.timeout_s:g} s (timeout_s); see {log}"
        except BaseException:  # Ctrl-C or SIGTERM: no trial is left behind
            _end(process)
            raise
    if status == 0:
        return None
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(f"{TRAIN}: ")]
    return errors[0] if errors else f"ended with status {status}; see {log}"


def trial_command(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> list[str]:
    """Command line of the trial, under torchrun where it has several ranks."""
    settings = [override(name, value) for name, value in configuration.items() if not _is_variable(name)]
    train = [
        "-m", "aorta.training", "--config", spec.config,
        "--override", *spec.overrides, *settings, f"{OUTPUT}={folder}",
    ]  # fmt: skip
    if spec.ranks == 1:
        return [sys.executable, *train]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(spec.ranks)]
    return [sys.executable, *launcher, *train]


def trial_environment(
    configuration: Mapping[str, Scalar], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of the trial's processes. A swept variable of this process does not leak in."""
    result = module_environment() if environ is None else dict(environ)
    for name, value in _variables(configuration).items():
        result.pop(name, None)
        if value is not None:
            result[name] = value
    # A sweep may itself run under a launcher.
    for name in RANK_VARIABLES:
        result.pop(name, None)
    return result


def _end(process: "subprocess.Popen[bytes]") -> None:
    # torchrun passes SIGTERM on to its ranks and waits for them; SIGKILL is for whatever is left after that.
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def read_trial(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
    """Point made of the records that a training run left in the folder."""
    try:
        judged = judge(load_run(folder, "trial"))
        judged_alone = dataset("trial", [judged])
        run = judged.run.run or read_run(folder)
    except AortaError as error:
        return _failed(configuration, str(error))
    wrong = ineffective(configuration, run)
    if wrong is not None:
        return _failed(configuration, wrong)
    trial = settled({"trial": judged_alone})["trial"]
    metrics = trial_metrics(trial, spec.objective)
    if metrics[spec.objective].value is None:
        return _failed(configuration, f"{spec.objective}: {metrics[spec.objective].reason}")
    return Point(
        configuration=dict(configuration),
        status="measured",
        metrics=metrics,
        source=judged.run.source,
        collectives="real",
        iterations=judged.run.num_steps - judged.num_warmup,
        warmup=judged.num_warmup,
        notes=[f"records in {folder}", *_effective(configuration, run), *remarks(trial)],
    )


def ineffective(configuration: Mapping[str, Scalar], run: RunRecord) -> str | None:
    """Sentence about a variable whose value in the run's processes is not the one asked for, or None."""
    for name, value in _variables(configuration).items():
        actual = run.environment.get(name)
        if actual != value:
            return f"{name} was to be {_value_text(value)}, in the run it was {_value_text(actual)}"
    return None


def trial_metrics(trial: Dataset, objective: str) -> dict[str, Metric]:
    """Metrics as measured, and calibrated ones under their own names where these lead or a step has them."""
    (judged,) = trial.runs
    is_partly_calibrated = has_any(trial)
    names = dict.fromkeys((objective, *METRICS))
    metrics = {name: metric(judged, name) for name in names}
    of_two_kinds = [name for name in names if is_of_two_kinds(name)]
    if trial.lead == "calibrated":
        for name in of_two_kinds:
            result = metric(judged, metric_of(trial.lead, name))
            # neither: a comparison judges one of the two kinds, chosen where both sides are known.
            metrics[calibrated(name)] = msgspec.structs.replace(result, better="neither", source=SOURCE)
        return metrics | accuracies(trial, of_two_kinds)
    if is_partly_calibrated:
        reason = few_calibrated(trial)
        for name in of_two_kinds:
            metrics[calibrated(name)] = Metric(value=None, unit=meaning(name).unit, reason=reason)
    return metrics


def metric(judged: JudgedRun, name: str) -> Metric:
    """Median over steps and ranks, with its interval where there are enough steps."""
    sense = meaning(name)
    statistic = judged.statistics.get(name)
    if statistic is None or statistic.median is None:
        reason = judged.run.not_measured.get(name, f"not given by source {judged.run.source}")
        return Metric(value=None, unit=sense.unit, better=sense.better, reason=reason)
    values = values_where_timed(judged, name)
    run_estimate = estimate(values)
    if run_estimate is None:
        return Metric(
            value=statistic.median, unit=sense.unit, better=sense.better, num=values.shape[1],
            reason=f"an interval needs {MIN_STEPS} steps with it after the warm-up",
        )  # fmt: skip
    value, (low, high) = side([run_estimate])
    return Metric(
        value=value, unit=sense.unit, better=sense.better, interval=Interval(low=low, high=high),
        error=run_estimate.error, freedom=run_estimate.freedom, num=run_estimate.num_steps,
    )  # fmt: skip


def _failed(configuration: Mapping[str, Scalar], reason: str) -> Point:
    return Point(configuration=dict(configuration), status="failed", reason=reason)


def _is_variable(name: str) -> bool:
    return name.startswith(ENVIRONMENT)


def _variables(configuration: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        name.removeprefix(ENVIRONMENT): None if value is None else _text(value)
        for name, value in configuration.items()
        if _is_variable(name)
    }


def _text(value: Scalar) -> str:
    """Value as text; libraries read 0 and 1, not False and True."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _effective(configuration: Mapping[str, Scalar], run: RunRecord) -> list[str]:
    return [
        f"in the run: {name}={run.environment[name]}"
        if name in run.environment
        else f"in the run: {name} unset"
        for name in _variables(configuration)
    ]


def _value_text(value: str | None) -> str:
    return "unset" if value is None else repr(value)
