"""A loss that the numbers of a run show, before it is put into words."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aorta.why.causes.cause import CauseKind, CauseSource
from aorta.why.causes.occasional import Floats as Floats
from aorta.why.causes.occasional import Occasions

MANY_RANKS = 16
"""One rank more or less is no matter to the median of so many."""


@dataclass(slots=True)
class CauseFinding:
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
    occasions: Occasions | None = None
    """Where it is in some steps alone: its mean over all steps then counts."""
    is_sure: bool = False
    """It lasts all along the run, and chance would not have it in so many steps: however the level drifts."""
    is_risk: bool = False
    """No time is lost yet: named whatever ms is."""


def positive(values: Floats) -> Floats:
    """Without what is below 0; NaN counts as 0."""
    result: Floats = np.maximum(np.nan_to_num(values), 0.0)
    return result


def of_the_others(values: Floats) -> Floats:
    """[rank, step]: median of the other ranks' values, of many ranks that of all; 0 of a single rank."""
    if len(values) < 2:
        return np.zeros_like(values)
    if len(values) > MANY_RANKS:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    return np.stack([np.median(np.delete(values, i, axis=0), axis=0) for i in range(len(values))])
