"""What recording may cost, as users write it."""

import math

from aorta.errors import ConfigError


def overhead_limit(value: float | str | None) -> float | None:
    """Return the share that "1%", 0.01 or "off" (None) stands for. Raises ConfigError for anything else."""
    if value is None or value == "off":
        return None
    share: float | None = None
    if isinstance(value, str):
        number, percent, rest = value.strip().partition("%")
        try:
            share = float(number) / (100 if percent else 1) if not rest else None
        except ValueError:
            share = None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    if share is None or not (math.isfinite(share) and 0 < share < 1):
        raise ConfigError(
            "overhead must be a share of the step time, such as '1%' or 0.01, or 'off',"
            f" got {str(value)[:80]!r}"
        )
    return share
