"""What no account can say, and no sentence: it would be a mistake of aorta's, and is not printed as a result.

The same rules hold for the numbers (in_cells), and for text that is about to be printed (in_text).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from aorta.account.load.rank.calls import ROUNDING_MS
from aorta.account.load.rank.impossible import ROUNDING
from aorta.timeline.arrays import Floats

PRINTED = 6e-3
"""The same of a number as it is printed, with three digits."""
MS_OF = {"us": 1e-3, "\u00b5s": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}

_NUMBER = r"(?P<sign>[-\u2212])?(?P<size>\d[\d,]*(?:\.\d+)?)"
_TIME = re.compile(rf"(?<![\w.,]){_NUMBER}[ \u00a0](?P<unit>min|ms|us|\u00b5s|s)\b(?P<rest>[^;,]*)")
_PERCENT = re.compile(rf"{_NUMBER}[ \u00a0]%(?P<rest>[^;,]*)")
_INTERVAL = re.compile(rf"{_NUMBER}[ \u00a0]ms\b[^;\[\]]*\[(?P<low>[-\u2212]?[\d.,]+), (?P<high>[\d.,]+)\]")
_NO_NUMBER = re.compile(r"\b(?:None|nan|n/a|inf)\b|\{\w+\}")
A_STEP = re.compile(r"^(?: a step\b| of the step\b)")
OF_STEP = re.compile(r"^ of a (?P<step>[\d.,]+) ms step\b")
TOTALS = re.compile(r"\b(?:in total|together|in all)\b")


@dataclass(frozen=True, slots=True)
class Limits:
    """What times in a sentence about a run may come to."""

    step_ms: float
    """Mean of the rank whose steps are longest."""
    longest_ms: float
    """The longest step of any rank, or the longest time between two."""
    has_groups: bool
    """Several ranks communicate."""


def please_report(what: str, contradiction: str) -> str:
    """The sentence that stands where a contradiction would."""
    return f"Cannot tell {what}: {contradiction}. This is a mistake of aorta: please report it with the run."


def in_cells(step_ms: Floats, cells: Mapping[str, Floats]) -> str | None:
    """Why these cells cannot be those of the steps, both [rank, step]; None where they can."""
    allowed = ROUNDING_MS + ROUNDING * step_ms
    total = np.zeros_like(step_ms)
    for name, ms in cells.items():
        if not np.isfinite(ms).all():
            return f"cell {name} has no number in some step"
        if (ms < -ROUNDING_MS).any():
            return f"cell {name} is below 0 in some step"
        if (ms > step_ms + allowed).any():
            return f"cell {name} is longer than its step"
        total += ms
    if cells and (np.abs(total - step_ms) > allowed).any():
        worst = float(np.abs(total - step_ms).max())
        return f"the parts of some step miss their sum by {worst:.3f} ms"
    return None


def in_text(text: str, limits: Limits) -> Iterator[str]:
    """What a sentence on the judged steps says that cannot be."""
    if found := _NO_NUMBER.search(text):
        yield f"«{found[0]}» stands for a number"
    for found in _TIME.finditer(text):
        if found["sign"]:
            continue  # of a difference
        ms, rest = _value(found["size"]) * MS_OF[found["unit"]], found["rest"]
        said = f"{found['size']} {found['unit']}"
        if A_STEP.match(rest) and limits.step_ms > 0 and _exceeds(ms, limits.step_ms):
            yield f"{said} of a step of {limits.step_ms:.4g} ms"
        elif (whole := OF_STEP.match(rest)) and _exceeds(ms, _value(whole["step"])):
            yield f"{said} of a step of {whole['step']} ms"
        elif limits.longest_ms > 0 and _exceeds(ms, limits.longest_ms) and not TOTALS.search(text):
            yield f"{said}, and the longest step takes {limits.longest_ms:.4g} ms"
    for found in _PERCENT.finditer(text):
        if not found["sign"] and _value(found["size"]) > 100.5:
            yield f"{found['size']} % of a whole"
    for found in _INTERVAL.finditer(text):
        if found["sign"]:
            continue
        low, high, value = (_value(found[name]) for name in ("low", "high", "size"))
        if low <= 0:
            yield f"the interval of {found['size']} holds 0"
        elif not low * (1 - PRINTED) <= value <= high * (1 + PRINTED):
            yield f"{found['size']} lies outside of its interval"
    if limits.has_groups and "no communication" in text and "recognised" not in text:
        yield "no communication, and several ranks have groups"


def _exceeds(ms: float, limit_ms: float) -> bool:
    return ms > limit_ms * (1 + PRINTED) + ROUNDING_MS


def _value(text: str) -> float:
    plain = text.replace(",", "").replace("\u2212", "-")
    try:
        return float(plain)
    except ValueError:
        return math.nan
