"""A loss that the numbers of a run show, before it is put into words."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aorta.account.cause import CauseKind, CauseSource
from aorta.account.judge.occasional import Occasions
from aorta.timeline.arrays import Flags, Floats

WAIT = ("wait", "communication")
"""Cells that hold what ranks wait for each other."""
ANY_CELL = (
    *("launch", "blocked", "idle", "core_taken", "synchronisation", "copy"),
    *("compute", "hidden", "optimizer"),
)
"""Cells of a loss of which no more is known than that it is not communication."""

OF_SAMPLES = 1.96
"""Over the root of how many samples show a loss: the part by which 95 % of as many would be off."""


@dataclass(slots=True, eq=False)
class CauseFinding:
    """What is lost to one reason in each judged step. Two are never the same one."""

    kind: CauseKind
    ms: Floats
    """[step]: what the step would be shorter by; NaN where it was not measured."""
    takes: dict[tuple[str, ...], float]
    """Cells of the account that hold the loss, the first that has it left first, and their part of ms. The
    parts add up to 1."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Numbers and names for the texts of its rule."""
    evidence: list[str] = field(default_factory=list)
    """Sentences beside those of the rule."""
    rank: int | None = None
    source: CauseSource = "records"
    occasions: Occasions | None = None
    """Where it is in some steps alone: its mean over all steps then counts."""
    steps: Flags | None = None
    """[judged step]: those of ms, where it is not in all; samples of these tell its line."""
    slow_steps: Occasions | None = None
    """Those of all steps, of which the loss may be a part."""
    is_sure: bool = False
    """It lasts all along the run, and chance would not have it in so many steps: however the level drifts."""
    more_ms: float = 0.0
    """What may go with it at most, for the upper end of its interval."""
    most_ms: float = math.inf
    """That it may come to with all of it, such as the phase that it is in."""
    num_samples: int = 0
    """That ms is as long as: few may be more or fewer by chance. 0 where it is of none."""
    size_error: float = 0.0
    """Logarithm of the ratio by which ms may be off, where it is of no samples."""
    is_risk: bool = False
    """No time is lost yet: named whatever ms is."""

    @property
    def sample_error(self) -> float:
        return OF_SAMPLES / math.sqrt(self.num_samples) if self.num_samples else self.size_error

    @property
    def mean_ms(self) -> float:
        finite = self.ms[np.isfinite(self.ms)]
        return max(float(finite.mean()), 0.0) if len(finite) else 0.0

    def shorten(self, part: float) -> None:
        """To that part of the loss."""
        self.ms = self.ms * part
        if (slow := self.occasions) is not None:
            excess_ms, error_ms = slow.excess_ms * part, slow.usual_error_ms * part
            self.occasions = replace(slow, excess_ms=excess_ms, usual_error_ms=error_ms)


def of_one_rank(num_ranks: int, *own: str) -> dict[tuple[str, ...], float]:
    """Takes of what one rank loses: the others wait for it as long as it is late by its own cells."""
    return {WAIT: (num_ranks - 1) / num_ranks, own: 1 / num_ranks}


def together(findings: list[CauseFinding]) -> dict[tuple[str, ...], float]:
    """Takes of several findings in one."""
    total = sum(finding.mean_ms for finding in findings)
    takes: dict[tuple[str, ...], float] = {}
    for finding in findings:
        part = finding.mean_ms / total if total > 0 else 1 / len(findings)
        for cells, share in finding.takes.items():
            takes[cells] = takes.get(cells, 0.0) + part * share
    return takes


def steps_with(values: Floats) -> Flags:
    """[step]: the steps that stand for a part that takes values: all, or of a rare one those that have it."""
    is_rare = np.median(values) == 0 and bool(values.any())
    return values > 0 if is_rare else np.ones(values.shape, dtype=bool)


def of_the_least(by_rank: Floats) -> Floats:
    """[step]: the ranks' mean, as far as the rank with least of it has it."""
    means = by_rank.mean(axis=1)
    if not means.mean() > 0:
        return np.zeros(by_rank.shape[1])
    part: Floats = by_rank.mean(axis=0) * (means.min() / means.mean())
    return part
