"""Changes of a replay: a few words of the user, and an edit of the graph's lengths and arcs."""

import re
from collections.abc import Callable
from typing import ClassVar, Protocol

from aorta.why.replay.draft import Draft


class Change(Protocol):
    """Edits a draft; several are applied one after the other."""

    @property
    def text(self) -> str:
        """The change as the user wrote it."""
        ...

    def apply(self, draft: Draft) -> None: ...


class Form:
    """A way to write a change: a pattern, an example, and the function that makes the change from a match."""

    all: ClassVar[list["Form"]] = []

    def __init__(
        self, pattern: str, example: str, meaning: str, make: Callable[[re.Match[str]], Change]
    ) -> None:
        self.pattern = re.compile(pattern, re.IGNORECASE)
        self.example, self.meaning, self.make = example, meaning, make
        Form.all.append(self)


NUMBER = r"\d+(?:\.\d+)?|\.\d+"
FACTOR = rf"x\s*(?P<factor>{NUMBER})"
DELAY = rf"(?P<ms>{NUMBER})\s*ms"


def form(pattern: str, example: str, meaning: str) -> Callable[[Callable[[re.Match[str]], Change]], Form]:
    """Registers the function below it as what a text of this pattern means."""
    return lambda make: Form(pattern, example, meaning, make)
