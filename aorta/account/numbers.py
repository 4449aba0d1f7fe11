"""Prints numbers, by one rule for tables, sentences, pictures and the page.

Three digits or more where they mean something (1,234 41.2 4.31 0.052), never an exponent: what is smaller
than the last digit is "<0.001", and a float's noise around zero is not a result. page.js has the same rule.
"""

import math

MINUS = "\N{MINUS SIGN}"
"""Minus sign of the page and of pictures; a terminal gets a hyphen, which can be searched and pasted."""
BYTE_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
LARGEST_DECIMAL = 1e15
"""Largest number printed with all its digits; above it powers of ten are used."""


def number(value: float | None, *, sign: bool = False, extra_digits: int = 0, minus: str = "-") -> str:
    """'n/a' of None, NaN and infinity. sign: with a plus. extra_digits: decimals beyond the usual."""
    if value is None or not math.isfinite(value):
        return "n/a"
    size = abs(value)
    if size >= LARGEST_DECIMAL:
        text = f"{size:.2e}"
    else:
        digits = extra_digits + (
            0 if size >= 999.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 or size == 0 else 3
        )
        text = f"{size:,.{digits}f}"
        if size > 0 and not text.strip("0.,"):
            if not sign and value > 0:
                return f"<{10.0**-digits:.{digits}f}"
            return text  # of a difference: neither more nor less, as far as it is printed
    return (minus if value < 0 else "+" if sign and value > 0 else "") + text


def quantity(value: float | None, unit: str, *, sign: bool = False, minus: str = "-") -> str:
    """A number with its unit. Bytes in the largest binary unit; whole counts and flags without decimals."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if unit == "bytes":
        return byte_text(value, sign=sign, minus=minus)
    if unit == "%":
        return percent(value, sign=sign, digits=1, minus=minus)
    if not unit and value == int(value) and abs(value) > 1:
        return (minus if value < 0 else "+" if sign else "") + f"{abs(value):,.0f}"
    text = number(value, sign=sign, minus=minus)
    return f"{text} {unit}" if unit else text


def percent(share: float | None, *, sign: bool = False, digits: int = 0, minus: str = "-") -> str:
    """A share of 1 in percent: '41 %'."""
    if share is None or not math.isfinite(share):
        return "n/a"
    text = f"{abs(100 * share):,.{digits}f}"
    is_zero = not text.strip("0.,")
    return ("" if is_zero else minus if share < 0 else "+" if sign else "") + f"{text} %"


def often(per_step: float) -> str:
    """'once a step', '4 times a step', '1.50 times a step on average', 'in 25 % of steps'"""
    if math.isclose(per_step, round(per_step), rel_tol=1e-6):
        return "once a step" if round(per_step) == 1 else f"{per_step:,.0f} times a step"
    return (
        f"in {percent(per_step)} of steps" if per_step < 1 else f"{number(per_step)} times a step on average"
    )


def byte_text(size: float | None, *, sign: bool = False, minus: str = "-") -> str:
    """'2.1 GiB'; whole bytes below 1 KiB."""
    if size is None or not math.isfinite(size):
        return "n/a"
    mark = minus if size < 0 else "+" if sign and size > 0 else ""
    for name, scale in BYTE_UNITS:
        if abs(size) >= scale:
            return f"{mark}{abs(size) / scale:,.1f} {name}"
    return f"{mark}{abs(size):.0f} B"


def times(ratio: float) -> str:
    """'1.69 times', '8 times', for ratios that a percentage makes hard to read."""
    return f"{ratio:.3g} times" if 1e-3 < ratio < 1e3 else f"{number(ratio)} times"


def counted(num: int, noun: str) -> str:
    """'1 step', '1,234 steps'."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def none_if_nan(value: float) -> float | None:
    """A number for a document, in which what is not known is null."""
    return None if value != value else float(value)
