"""Reads changes from the words of `aorta why --if`."""

import re
from collections.abc import Iterable

from aorta.errors import ReplayError, did_you_mean
from aorta.why.replay.changes import collectives, host, kernels  # noqa: F401  (register their forms)
from aorta.why.replay.changes.change import FACTOR, FORMS, Change

LARGEST = 1e6
_CLASS = re.compile(rf"(?P<label>[a-z_]+)\s+{FACTOR}", re.IGNORECASE)


def parse_change(text: str) -> Change:
    """The change that a text like 'all_gather x0.5' means. ReplayError names the nearest form otherwise."""
    words = " ".join(text.split())
    for form in FORMS:
        match = form.pattern.fullmatch(words)
        if match is not None:
            _check(words, match)
            return form.make(match)
    match = _CLASS.fullmatch(words)
    first_words = {form.example.split()[0] for form in FORMS}
    if match is not None and match["label"].lower() not in first_words:
        _check(words, match)
        return kernels.kernel_class_change(words, match["label"], float(match["factor"]))
    examples = [form.example for form in FORMS] + [f"{label} x0.8" for label in kernels.CLASSES]
    near = did_you_mean(words, examples)
    raise ReplayError(
        f"{words!r} is no change{near or '; changes are ' + '; '.join(form.example for form in FORMS)}"
    )


def parse_changes(texts: Iterable[str]) -> list[Change]:
    return [parse_change(text) for text in texts]


def forms() -> list[tuple[str, str]]:
    """An example of every change, and what it means."""
    rows = [(form.example, form.meaning) for form in FORMS]
    rows.append(
        ("gemm x0.8", f"kernels of a class take this many times as long: {', '.join(kernels.CLASSES)}")
    )
    return rows


def _check(text: str, match: re.Match[str]) -> None:
    for name in ("factor", "ms"):
        value = match.groupdict().get(name)
        if value is not None and float(value) > LARGEST:
            raise ReplayError(f"{text!r}: {name} {value} is more than {LARGEST:g}")
