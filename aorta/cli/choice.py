"""Ranks and steps as options name them; ReportError in one line where they do not."""

from aorta.errors import ReportError


def step_span(text: str | None) -> tuple[int, int] | None:
    """The first and the last step of FIRST:LAST."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not first.strip().isdigit() or (colon and not last.strip().isdigit()):
        raise ReportError(f"--steps {text} is not FIRST:LAST, as in 10:40")
    span = int(first), int(last) if colon else int(first)
    if span[1] < span[0]:
        raise ReportError(f"--steps {text}: the last step comes before the first")
    return span


def rank_set(text: str | None) -> set[int] | None:
    """The ranks of a list such as 0,1,4-7."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ReportError(f"--ranks {text} is not a list of ranks, as in 0,1,4-7")
        chosen.update(range(int(first), int(last if dash else first) + 1))
    return chosen
