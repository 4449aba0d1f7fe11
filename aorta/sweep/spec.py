"""SWEEP.yaml: what is varied, what is kept, what counts."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from aorta.config import configuration_path, load_config, validate
from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError, did_you_mean
from aorta.report.metrics import MEANINGS, metric_key
from aorta.sweep.knobs import check_knob

FILES = Path(__file__).resolve().parent / "files"
"""Sweeps that come with aorta."""

Scalar = bool | int | float | str | None
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
OUTPUT = "training.output_dir"
ENVIRONMENT = "env."
"""In front of the names of variables, in configurations of trials."""


class ChoiceRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers from low to high, both included. For optuna."""

    low: int | float
    high: int | float
    log: bool = False
    """Drawn evenly in the logarithm."""
    step: int | float | None = None


Choice = list[Scalar] | ChoiceRange


class SweepSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Of the sweep's folder."""

    config: str = "default"
    """Settings that all trials start from: a file relative to the sweep's, or a name as of `aorta train`."""

    overrides: list[str] = []
    """Settings of all trials, as for train.py."""

    ranks: PositiveInt = 1
    """Ranks on this machine per trial."""

    objective: str = "step_ms"
    """A metric of the report, such as exposed_ms or comm_ms.all_gather: its median over steps and ranks."""

    goal: Literal["minimize", "maximize"] | None = None
    """null: what is better for this metric."""

    method: Literal["grid", "optuna"] = "grid"
    """grid: every combination. optuna: its TPE sampler proposes `trials` of them (extra 'sweep')."""

    trials: PositiveInt = 20
    """Of optuna."""

    seed: int = 0
    """Of optuna's proposals."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 1800.0
    """After this long a trial has failed."""

    parameters: dict[str, Choice] = {}
    """Settings by their dotted name: a list of values, or a range."""

    environment: dict[str, Choice] = {}
    """Environment variables: values as text or numbers; null: not set."""

    def choices(self) -> dict[str, Choice]:
        """Everything that is varied."""
        return {**self.parameters, **{ENVIRONMENT + name: c for name, c in self.environment.items()}}

    def maximizes(self) -> bool:
        if self.goal is not None:
            return self.goal == "maximize"
        return MEANINGS[metric_key(self.objective).name].better == "higher"

    def grid(self) -> Iterator[dict[str, Scalar]]:
        """Every combination, the last name varying fastest."""
        lists = {name: choice for name, choice in self.choices().items() if isinstance(choice, list)}
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))

    def num_trials(self) -> int:
        if self.method == "optuna":
            return self.trials
        return math.prod(len(choice) for choice in self.choices().values() if isinstance(choice, list))


def load_spec(path: Path | str) -> SweepSpec:
    """ConfigError in one line for whatever cannot be swept: before anything runs.

    config/sweeps/NAME.yaml, where there is no such file, is the one that comes with aorta.
    """
    path = Path(path)
    if not path.exists() and path.parts[-3:-1] == ("config", "sweeps"):
        path = FILES / path.name
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold settings such as 'name:' and 'parameters:'")
    for key in data:
        if key not in SweepSpec.__struct_fields__:
            hint = did_you_mean(str(key), SweepSpec.__struct_fields__)
            raise ConfigError(f"{path}: {key} is no setting of a sweep{hint}")
    try:
        spec = msgspec.convert(data, SweepSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not Path(spec.config).is_absolute():
        sibling = path.parent / spec.config
        config = sibling if sibling.is_file() else configuration_path(spec.config)
        spec = msgspec.structs.replace(spec, config=str(config))
    check_spec(spec, str(path))
    return spec


def check_spec(spec: SweepSpec, place: str) -> None:
    if not spec.name or set(spec.name) & set("/\\") or spec.name.startswith("."):
        raise ConfigError(f"{place}: name {spec.name!r} cannot be the name of a folder")
    if not spec.choices():
        raise ConfigError(f"{place}: nothing is varied: give parameters or environment")
    kind = metric_key(spec.objective).name
    if kind not in MEANINGS:
        hint = did_you_mean(kind, MEANINGS, f"; there is {', '.join(MEANINGS)}")
        raise ConfigError(f"{place}: objective {spec.objective} is no metric of the report{hint}")
    if spec.goal is None and MEANINGS[kind].better == "neither":
        raise ConfigError(f"{place}: {spec.objective} is neither better nor worse when it grows: give a goal")
    if any(setting.partition("=")[0] == OUTPUT for setting in (*spec.parameters, *spec.overrides)):
        raise ConfigError(
            f"{place}: {OUTPUT} is a folder of the sweep for each trial; give sweep.py an --output"
        )
    for name, choice in spec.choices().items():
        _check_choice(spec, name, choice, place)
    for name in spec.environment:
        check_knob(name)
    for name, choice in spec.parameters.items():
        for value in _ends(choice):
            # Each value alone; combinations that do not fit each other are trials that fail.
            load_config(spec.config, [*spec.overrides, override(name, value)])
    if spec.method == "grid":
        validate(load_config(spec.config, spec.overrides), spec.ranks)


def _check_choice(spec: SweepSpec, name: str, choice: Choice, place: str) -> None:
    if any(isinstance(value, float) and not math.isfinite(value) for value in _ends(choice)):
        raise ConfigError(f"{place}: {name} has a value that is no finite number")
    if isinstance(choice, list):
        if not choice or len({repr(value) for value in choice}) < len(choice):
            raise ConfigError(f"{place}: {name} needs one value or more, each once")
        return
    if spec.method == "grid":
        raise ConfigError(f"{place}: {name} is a range; a grid needs a list of values, or use method: optuna")
    if not choice.low < choice.high or choice.log and choice.low <= 0:
        raise ConfigError(f"{place}: {name} cannot range from {choice.low} to {choice.high}")
    if choice.step is not None and not 0 < choice.step < math.inf:
        raise ConfigError(f"{place}: {name} cannot go in steps of {choice.step}")
    if choice.log and choice.step is not None:
        raise ConfigError(f"{place}: {name} cannot have both log and step")


def _ends(choice: Choice) -> list[Scalar]:
    return choice if isinstance(choice, list) else [choice.low, choice.high]


def override(name: str, value: Scalar) -> str:
    """For train.py's --override."""
    return f"{name}={msgspec.json.encode(value).decode()}"
