"""The cells of a matrix: every combination of settings, environments and words before the command.

A recipe is a YAML file of them (Recipe). Recipes of ROCm/aorta's `sweep run` load as far as they describe a
matrix over a command: their axes of named environments, cells, trials, limits of time, the step time as a
line of the output. What they ask for beside that is refused or said.
"""

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError, did_you_mean
from aorta.sweep.metrics import RunMetric, parsed_metric
from aorta.sweep.series import Variant

FILES = Path(__file__).resolve().parent / "files"
"""Recipes that come with aorta, and environments by name."""
Scalar = bool | int | float | str | None
Positive = Annotated[int, msgspec.Meta(ge=1)]
Environment = dict[str, str | None]
MOST_CELLS = 1000
NONE = "none"


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a recipe's file. The command may follow on the command line instead."""

    command: str | list[str] = ""
    """Text as for a shell, without being given to one; or words."""

    settings: dict[str, list[Scalar]] = {}
    """{KEY} in the command becomes each value; where it has none, KEY=VALUE is appended."""

    variables: dict[str, list[Scalar]] = {}
    """Environment variables, each with its values; null: not set."""

    environments: list[str] | dict[str, dict[str, Scalar]] = {}
    """Variables set together, by a name; a list: names of those that come with aorta."""

    prefixes: dict[str, str] = {}
    """Words before the command, by a name: a container, numactl, srun."""

    cells: dict[str, dict[str, Scalar]] = {}
    """In place of a product of environments: cells by name, with their variables."""

    trials: Positive = 3
    """Runs of each cell."""

    baseline: str | None = None
    """Name of the cell that the others are compared with; null: the first."""

    metrics: list[str] = []
    """As --metric has them; the first is step_ms where nothing is given."""

    matters: float = 3.0
    """Percent: the smallest change that matters."""

    fails_if: str | None = None
    """Regular expression: a run whose output has it has failed, whatever its exit status."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """Seconds of one run."""

    slower_by: float | None = None
    """Percent from which on a cell that fails less counts as merely slower; null: what matters."""


class Axis(msgspec.Struct, frozen=True):
    """One direction of the matrix: what each of its points does to the command."""

    points: list["Point"]


class Point(msgspec.Struct, frozen=True):
    name: str
    """'' where it has no part in the name of a cell."""
    setting: tuple[str, str] | None = None
    environment: Environment = {}
    prefix: tuple[str, ...] = ()


def axes_of(recipe: Recipe) -> list[Axis]:
    axes = [setting_axis(name, _texts(name, values)) for name, values in recipe.settings.items()]
    axes += [
        variable_axis(name, [None if value is None else text_of(value) for value in _several(name, values)])
        for name, values in recipe.variables.items()
    ]
    known = environments_by_name()
    named: dict[str, Environment] = {}
    if isinstance(recipe.environments, list):
        for name in recipe.environments:
            if name not in known:
                hint = did_you_mean(name, known, f"; there is {', '.join(known)}")
                raise ConfigError(f"environments: {name} is not known{hint}")
            named[name] = known[name]
    else:
        named = {name: as_environment(values) for name, values in recipe.environments.items()}
    if named:
        axes.append(environment_axis(named))
    if recipe.cells:
        axes.append(environment_axis({name: as_environment(v) for name, v in recipe.cells.items()}))
    if recipe.prefixes:
        axes.append(prefix_axis({name: shlex.split(text) for name, text in recipe.prefixes.items()}))
    return axes


def setting_axis(name: str, values: Sequence[str]) -> Axis:
    return Axis([Point(f"{name}={value}", setting=(name, value)) for value in values])


def variable_axis(name: str, values: Sequence[str | None]) -> Axis:
    check_variable(name)
    return Axis([Point(f"{name}={'(unset)' if v is None else v}", environment={name: v}) for v in values])


def environment_axis(named: Mapping[str, Environment]) -> Axis:
    for values in named.values():
        for name in values:
            check_variable(name)
    return Axis([Point(name, environment=dict(values)) for name, values in named.items()])


def prefix_axis(named: Mapping[str, Sequence[str]]) -> Axis:
    return Axis([Point(name, prefix=tuple(words)) for name, words in named.items()])


def cells_of(axes: Sequence[Axis], command: Sequence[str]) -> list[Variant]:
    """A variant for each combination, the last axis varying fastest. Raises ConfigError for what is none."""
    if not command:
        raise ConfigError("there is no command: give one behind --, or command: in the recipe")
    num = 1
    for axis in axes:
        num *= len(axis.points)
    if num < 2:
        raise ConfigError("nothing is varied: give --set, --env, --bundle, --prefix or a --recipe")
    if num > MOST_CELLS:
        raise ConfigError(f"{num} cells are more than {MOST_CELLS}")
    cells = [_cell(points, command) for points in itertools.product(*(axis.points for axis in axes))]
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two cells are called {name!r}: each value may stand once")
    return cells


def _cell(points: Sequence[Point], command: Sequence[str]) -> Variant:
    words = list(command)
    environment: Environment = {}
    prefix: list[str] = []
    for point in points:
        if point.setting is not None:
            words = with_setting(words, *point.setting)
        for name, value in point.environment.items():
            if name in environment and environment[name] != value:
                raise ConfigError(f"{name} is set twice in one cell, to {environment[name]} and {value}")
            environment[name] = value
        prefix += point.prefix
    name = ", ".join(point.name for point in points if point.name)
    return Variant(name, [*prefix, *words], environment)


def with_setting(command: Sequence[str], key: str, value: str) -> list[str]:
    """{KEY} replaced in the command, or KEY=VALUE behind it."""
    words = [word.replace(f"{{{key}}}", value) for word in command]
    return words if words != list(command) else [*words, f"{key}={value}"]


def parsed_values(option: str, text: str) -> tuple[str, list[str]]:
    """KEY and its values, of KEY=A,B. ConfigError for fewer than two, or one twice."""
    key, equals, rest = text.partition("=")
    values = rest.split(",")
    if not key or not equals or len(values) < 2 or len(set(values)) < len(values):
        raise ConfigError(f"{option} {text}: must be KEY=A,B with two or more values that differ")
    return key, values


def parsed_bundle(text: str) -> tuple[str, Environment]:
    """Name and variables, of NAME:VAR=A,VAR=B, or the name alone of an environment that comes with aorta."""
    name, colon, rest = text.partition(":")
    if not colon:
        known = environments_by_name()
        if name not in known:
            hint = did_you_mean(name, known, "; write NAME:VAR=VALUE,...")
            raise ConfigError(f"--bundle {text}: {name} is no environment that comes with aorta{hint}")
        return name, known[name]
    environment: Environment = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--bundle {text}: {part!r} must be VAR=VALUE")
        environment[key] = value or None
    return name, environment


def parsed_prefix(text: str) -> tuple[str, list[str]]:
    name, equals, words = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"--prefix {text}: must be NAME=WORDS, for instance numa='numactl -N 0'")
    return name, shlex.split(words)


def environments_by_name() -> dict[str, Environment]:
    return {name: as_environment(values) for name, values in read_yaml(FILES / "environments.yaml").items()}


def as_environment(values: Mapping[str, Scalar]) -> Environment:
    return {name: None if value is None else text_of(value) for name, value in values.items()}


def text_of(value: Scalar) -> str:
    """As text; programs read 0 and 1, not False and True."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def check_variable(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(f"{name!r} cannot be the name of an environment variable")


def _several(name: str, values: Sequence[Scalar]) -> Sequence[Scalar]:
    if not values or len({repr(value) for value in values}) < len(values):
        raise ConfigError(f"{name} needs one value or more, each once")
    return values


def _texts(name: str, values: Sequence[Scalar]) -> list[str]:
    return ["null" if value is None else text_of(value) for value in _several(name, values)]


# ---- files -------------------------------------------------------------------------------------


def load_recipe(path: Path | str) -> tuple[Recipe, list[str]]:
    """The recipe of a YAML file, and what of it is not done. config/sweeps/NAME.yaml is the one that comes
    with aorta, unless there is such a file here."""
    path = Path(path)
    if not path.exists() and path.parts[-3:-1] == ("config", "sweeps"):
        path = FILES / path.name
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold keys such as 'command:' and 'settings:'")
    notes: list[str] = []
    if "schema_version" in data:
        data, notes = _of_upstream(data, str(path))
    for key in data:
        if key not in Recipe.__struct_fields__:
            hint = did_you_mean(str(key), Recipe.__struct_fields__)
            raise ConfigError(f"{path}: {key} is no key of a recipe{hint}")
    try:
        recipe = msgspec.convert(data, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    if recipe.fails_if is not None:
        check_expression(f"{path}: fails_if", recipe.fails_if)
    for text in recipe.metrics:
        parsed_metric(text)
    return recipe, notes


def check_expression(place: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{place}: {expression!r} is no regular expression: {error}") from None


_SAID = {
    "collect_paths": "collects no files: each run's folder has its output",
    "redaction": "has rules of its own for secrets (docs/stored.md)",
    "env_passthrough_mode": "passes variables to the command's process, and by no file",
    "save_logs": "keeps the output of every run",
    "env_overlay": "does not read env_overlay",
    "collect": "collects nothing beside the records of `aorta run`",
}
_SILENT = ("ticket", "mode", "steps", "description", "name")


class _Confound(msgspec.Struct, frozen=True):
    threshold: float | None = None
    baseline_cell: str | None = None


class _UpstreamCell(msgspec.Struct, frozen=True):
    name: str
    mitigations: tuple[str, ...] = (NONE,)
    environment: str = "local"
    extra_env: dict[str, Scalar] = {}


class _Upstream(msgspec.Struct, frozen=True):
    """Keys of a recipe of ROCm/aorta that say what this sweep does too."""

    schema_version: Literal[1]
    trials: int | None = None
    timeout_per_trial: float | None = None
    step_time_regex: str | None = None
    mitigation_axis: tuple[str, ...] = (NONE,)
    diagnostic_axis: tuple[str, ...] = (NONE,)
    cells: list[_UpstreamCell] = []
    confound: _Confound | None = None


def _of_upstream(data: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """A recipe of ROCm/aorta (schema_version 1) as one of ours, and what of it is not done."""
    if "workload" in data:
        raise ConfigError(
            f"{place}: workload {data['workload']} is a program of ROCm/aorta: aorta sweep runs commands;"
            " leave out workload and workload_config, and give the command behind --"
        )
    try:
        recipe = msgspec.convert(data, _Upstream)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None
    notes = [f"aorta {_SAID[key]} ({key})" for key in data if key in _SAID and data[key]]
    known_keys = {*_Upstream.__struct_fields__, *_SAID, *_SILENT}
    notes += [f"{key} is not supported and left out" for key in data if key not in known_keys]
    known = environments_by_name()
    cells: dict[str, Environment] = {}
    for cell in recipe.cells:
        if cell.environment != "local":
            raise ConfigError(
                f"{place}: cell {cell.name}: environment {cell.environment} is a container of ROCm/aorta's"
                " registry; give its words with --prefix"
            )
        cells[cell.name] = _together(cell.mitigations, known, place) | as_environment(cell.extra_env)
    if not recipe.cells:
        for names in itertools.product(recipe.mitigation_axis, recipe.diagnostic_axis):
            cells["-".join(names)] = _together(names, known, place)
    confound = recipe.confound or _Confound()
    threshold = confound.threshold
    found = {
        "trials": recipe.trials,
        "timeout_s": recipe.timeout_per_trial,
        "metrics": [f"step_time={recipe.step_time_regex}"] if recipe.step_time_regex else None,
        "slower_by": None if threshold is None else round(100 * (threshold - 1), 6),
        "baseline": confound.baseline_cell,
        "cells": cells,
    }
    return {key: value for key, value in found.items() if value is not None}, notes


def _together(names: Sequence[str], known: Mapping[str, Environment], place: str) -> Environment:
    values: Environment = {}
    for name in names:
        if name not in known:
            hint = did_you_mean(str(name), known, "; write such a cell with extra_env: instead")
            raise ConfigError(f"{place}: mitigation {name} is not known{hint}")
        values |= known[name]
    return values


def metrics_of(texts: Sequence[str]) -> list[RunMetric]:
    """As given, each name once; step_ms where none is."""
    metrics = [parsed_metric(text) for text in texts or ["step_ms"]]
    names = [metric.name for metric in metrics]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--metric {name} is given twice")
    return metrics


def with_baseline_first(cells: list[Variant], name: str | None) -> list[Variant]:
    """Raises ConfigError where no cell has the name."""
    if name is None:
        return cells
    chosen = [cell for cell in cells if cell.name == name]
    if not chosen:
        hint = did_you_mean(name, [cell.name for cell in cells], f"; there is {_some(cells)}")
        raise ConfigError(f"--baseline {name!r} is no cell{hint}")
    return [*chosen, *(cell for cell in cells if cell.name != name)]


def _some(cells: Sequence[Variant]) -> str:
    names: Iterator[str] = (repr(cell.name) for cell in cells)
    return ", ".join(itertools.islice(names, 6))
