"""HTML that is safe by construction: text is escaped unless a function here made it."""

import html
from collections.abc import Iterable
from typing import TypeAlias

VOID = frozenset(("br", "hr", "input", "link", "meta"))


class Markup(str):
    """HTML or SVG source; a plain str is text."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. class_='a' gives class="a", data_x=1 gives data-x="1"; None and False leave one out."""
    attribute_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{attribute_text}>")
    return Markup(f"<{name}{attribute_text}>{join(children)}</{name}>")


def join(child: Child) -> Markup:
    """Children after one another, text escaped."""
    if child is None:
        return Markup()
    if isinstance(child, Markup):
        return child
    if isinstance(child, (str, int)):
        return Markup(html.escape(str(child)))
    return Markup("".join(map(join, child)))


def json_script(element_id: str, data: bytes) -> Markup:
    """JSON as a script element that is never run and cannot be left: <, > and & are escaped within it.

    U+2028 and U+2029 are legal in JSON and are escaped for readers that take it for JavaScript.
    """
    text = data.decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{element_id}">{text}</script>')
