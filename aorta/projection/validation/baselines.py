"""Other tools' predictions for rows of the published tables, as data with their sources."""

from functools import cache
from pathlib import Path

import msgspec

from aorta.config.strict import convert
from aorta.config.yaml_files import read_yaml

FILE = Path(__file__).with_name("baselines.yaml")


class Calculon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calculon's published accuracy and its step times where it was run again."""

    source: str
    mean_abs_error_pct: float
    num_rows: int
    rerun: str
    step_s: dict[str, float]


class Primus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Throughput that Primus projected, measured on one node and rescaled."""

    source: str
    tokens_per_s_per_gpu: dict[str, float]


class Baselines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    calculon: Calculon
    primus: Primus


@cache
def baselines() -> Baselines:
    """The file of this folder."""
    return convert(read_yaml(FILE), Baselines, str(FILE))
