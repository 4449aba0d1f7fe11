"""Numbers in tables."""

from typing import Any


def plain(value: Any, missing: str = "") -> str:
    """Four digits, without an exponent for large numbers."""
    if value is None:
        return missing
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
