"""Pricers of measured rows: rows of one part share what its kernels cost, which is most of a projection."""

from aorta.projection.pricing import Factors, Pricer, factors_of
from aorta.projection.validation.rows import Row

_PRICERS: dict[int, Pricer] = {}
"""By the id of the part, which its pricer keeps alive; there are as many as hardware files."""


def pricer_of(row: Row, factors: Factors | None = None) -> Pricer:
    """A pricer for the row's first plan; factors: those of the part where None."""
    hardware = row.hardware
    if id(hardware) not in _PRICERS:
        _PRICERS[id(hardware)] = Pricer(hardware, row.plans[0][1])
    return _PRICERS[id(hardware)].with_plan(row.plans[0][1]).with_factors(factors or factors_of(hardware))
