"""Changes of a replay: a few words of the user, and an edit of the graph's lengths and arcs."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from aorta.errors import ReplayError
from aorta.why.replay.draft import Draft

NUMBER = r"\d+(?:\.\d+)?|\.\d+"
FACTOR = rf"x\s*(?P<factor>{NUMBER})"
DELAY = rf"(?P<ms>{NUMBER})\s*ms"
_READ: dict[str, Callable[[str], Any]] = {"factor": float, "ms": float, "rank": int, "num": int}
_READ |= {"units": lambda text: int("".join(text.split())), "name": str.strip}
"""Groups of patterns that are no plain text."""


class UnfitError(Exception):
    """Why a change does not fit the traces."""


class Change(NamedTuple):
    """Edits a draft; several are applied one after the other."""

    text: str
    """As the user wrote it."""
    edit: Callable[[Draft], None]

    def apply(self, draft: Draft) -> None:
        try:
            self.edit(draft)
        except UnfitError as why:
            raise ReplayError(f"{self.text!r}: {why}") from None


class Form(NamedTuple):
    """A way to write a change."""

    pattern: re.Pattern[str]
    example: str
    meaning: str
    edit: Callable[..., None]
    why_not: Callable[..., str]

    def make(self, match: re.Match[str]) -> Change:
        groups = match.groupdict().items()
        values = {name: None if text is None else _READ.get(name, str)(text) for name, text in groups}
        if why_not := self.why_not(**values):
            raise ReplayError(f"{match[0]!r}: {why_not}")
        return Change(match[0], partial(self.edit, **values))


FORMS: list[Form] = []
Edit = TypeVar("Edit", bound=Callable[..., None])


def form(
    pattern: str, example: str, meaning: str, why_not: Callable[..., str] = lambda **_: ""
) -> Callable[[Edit], Edit]:
    """Registers the function below it as what a text of this pattern does to a draft. The pattern's groups
    are arguments of the function, and of why_not, which gives the reason where no trace could have it."""

    def register(edit: Edit) -> Edit:
        FORMS.append(Form(re.compile(pattern, re.IGNORECASE), example, meaning, edit, why_not))
        return edit

    return register
