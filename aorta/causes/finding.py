"""A loss that the numbers of a run show, before it is put into words."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aorta.causes.cause import CauseKind, CauseSource

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Finding:
    """What is lost to one reason in each judged step."""

    kind: CauseKind
    ms: Floats
    """[step]: what the step would be shorter by; NaN where it was not measured."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and names for the texts of its rule."""
    evidence: list[str] = field(default_factory=list)
    """Sentences beside those of the rule."""
    rank: int | None = None
    source: CauseSource = "records"
    is_risk: bool = False
    """No time is lost yet: named whatever ms is."""


def positive(values: Floats) -> Floats:
    """Without what is below 0; NaN counts as 0."""
    result: Floats = np.maximum(np.nan_to_num(values), 0.0)
    return result


def of_the_others(values: Floats, average: str = "median") -> Floats:
    """[rank, step]: median, or least, of the other ranks' values; 0 where there is one rank."""
    if len(values) < 2:
        return np.zeros_like(values)
    result = np.empty_like(values)
    for i in range(len(values)):
        others = np.delete(values, i, axis=0)
        result[i] = np.median(others, axis=0) if average == "median" else others.min(axis=0)
    return result
