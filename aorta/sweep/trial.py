"""One trial: a training run in processes of its own, and its numbers."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from aorta.command_line import module_environment
from aorta.errors import AortaError
from aorta.launcher import RANK_VARIABLES
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord
from aorta.report.judge.judged import dataset, judge
from aorta.report.judge.leading import few_calibrated, has_any, metric_of, remarks, settled
from aorta.report.judge.timed_steps import values_where_timed
from aorta.report.load.open import load_run
from aorta.report.metrics import meaning
from aorta.report.model import Dataset, JudgedRun
from aorta.results.leading import SOURCE, accuracies, calibrated, is_of_two_kinds
from aorta.results.schema import Interval, Metric, Point, Value
from aorta.sweep.spec import ENVIRONMENT, OUTPUT, Scalar, SweepSpec, override
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
"""Kept of every trial beside the objective."""
TRAIN = "aorta train"
"""What the trial's own mistakes begin with."""
_GRACE_S = 45.0
"""Beyond the 30 s that torchrun gives ranks deaf to SIGTERM: they are in sessions of their own, and without
torchrun nobody would end them."""


def trial_name(configuration: Mapping[str, Scalar]) -> str:
    """Name of a trial's folder: the same configuration has the same one."""
    return hashlib.sha256(msgspec.json.encode(dict(configuration), order="deterministic")).hexdigest()[:12]


def run_trial(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
    """Train once and read the records. A trial that fails says why; it raises nothing for that."""
    folder.mkdir(parents=True, exist_ok=True)
    fault = _train(spec, configuration, folder)
    if fault is not None:
        return _failed(configuration, fault)
    return read_trial(spec, configuration, folder)


def read_trial(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> Point:
    """Point of what a training run left in the folder."""
    try:
        judged = judge(load_run(folder, "trial"))
        judged_alone = dataset("trial", [judged])
        run = judged.run.run or read_run(folder)
    except AortaError as error:
        return _failed(configuration, str(error))
    wrong = ineffective(configuration, run)
    if wrong is not None:
        return _failed(configuration, wrong)
    values, effective = _values(configuration), _effective(configuration, run)
    trial = settled({"trial": judged_alone})["trial"]
    observed = remarks(trial)
    metrics = trial_metrics(trial, spec.objective)
    if metrics[spec.objective].value is None:
        return _failed(configuration, f"{spec.objective}: {metrics[spec.objective].reason}")
    return Point(
        configuration=values,
        status="measured",
        metrics=metrics,
        source=judged.run.source,
        collectives="real",
        iterations=judged.run.num_steps - judged.num_warmup,
        warmup=judged.num_warmup,
        notes=[f"records in {folder}", *effective, *observed],
    )


def trial_metrics(trial: Dataset, objective: str) -> dict[str, Metric]:
    """Metrics as measured, and calibrated under names of their own, where these lead or a step has them."""
    (judged,) = trial.runs
    is_partly_calibrated = has_any(trial)
    names = dict.fromkeys((objective, *METRICS))
    metrics = {name: metric(judged, name) for name in names}
    of_two_kinds = [name for name in names if is_of_two_kinds(name)]
    if trial.lead == "calibrated":
        for name in of_two_kinds:
            result = metric(judged, metric_of(trial.lead, name))
            # Which of the two a comparison judges is decided where both sides are known.
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


def ineffective(configuration: Mapping[str, Scalar], run: RunRecord) -> str | None:
    """Value of a variable in the run's own processes, where it is not what was asked for."""
    for name, value in _variables(configuration).items():
        actual = run.environment.get(name)
        if actual != value:
            return f"{name} was to be {_value_text(value)}, in the run it was {_value_text(actual)}"
    return None


def trial_environment(
    configuration: Mapping[str, Scalar], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of the trial's processes, before their runtimes start. What is swept does not leak in from
    here."""
    result = module_environment() if environ is None else dict(environ)
    for name, value in _variables(configuration).items():
        result.pop(name, None)
        if value is not None:
            result[name] = value
    # A sweep may itself run under a launcher.
    for name in RANK_VARIABLES:
        result.pop(name, None)
    return result


def trial_command(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> list[str]:
    settings = [override(name, value) for name, value in configuration.items() if not _is_variable(name)]
    train = [
        "-m", "aorta.training", "--config", spec.config,
        "--override", *spec.overrides, *settings, f"{OUTPUT}={folder}",
    ]  # fmt: skip
    if spec.ranks == 1:
        return [sys.executable, *train]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(spec.ranks)]
    return [sys.executable, *launcher, *train]


def _train(spec: SweepSpec, configuration: Mapping[str, Scalar], folder: Path) -> str | None:
    """Runs the trial and returns what went wrong. Its output is in trial.log."""
    log = folder / "trial.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            trial_command(spec, configuration, folder),
            env=trial_environment(configuration),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(spec.timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"took longer than {spec.timeout_s:g} s (timeout_s); see {log}"
        except BaseException:  # Ctrl-C: no trial is left behind
            _end(process)
            raise
    if status == 0:
        return None
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith(f"{TRAIN}: ")]
    return errors[0] if errors else f"ended with status {status}; see {log}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _failed(configuration: Mapping[str, Scalar], reason: str) -> Point:
    return Point(configuration=_values(configuration), status="failed", reason=reason)


def _values(configuration: Mapping[str, Scalar]) -> dict[str, Value]:
    return dict(configuration)


def _is_variable(name: str) -> bool:
    return name.startswith(ENVIRONMENT)


def _variables(configuration: Mapping[str, Any]) -> dict[str, str | None]:
    return {
        name.removeprefix(ENVIRONMENT): None if value is None else _text(value)
        for name, value in configuration.items()
        if _is_variable(name)
    }


def _text(value: Scalar) -> str:
    """0 and 1 are what libraries understand."""
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
