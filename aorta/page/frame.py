"""A page of sections without scripts: for the results of a matrix, or the history of a gate."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources

from aorta._version import __version__
from aorta.page import parts as palette
from aorta.page.parts import Markup, hatches, tag

FOOTER = tag("footer", f"aorta {__version__}. This page loads nothing from anywhere.")


def framed(heading: str, sections: Sequence[Markup | None], links: Mapping[str, str]) -> str:
    """The source of a page. links: titles in the navigation, by the name of a section."""
    style = style_text()
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {hash_of(style)}"
    return document(
        heading,
        style,
        policy,
        tag(
            "header",
            tag("div", tag("b", "aorta"), " ", tag("span", heading), class_="brand"),
            tag("nav", [tag("a", text, href=f"#{name}") for name, text in links.items()]),
        ),
        tag("main", [one for one in sections if one is not None]),
        FOOTER,
        hatches(),
    )


def document(heading: str, style: Markup, policy: str, *body: Markup) -> str:
    """policy: what a browser may load and run, as it stands behind Content-Security-Policy."""
    return "<!doctype html>\n" + tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{heading} \u2013 aorta"),
            tag("style", style),
        ),
        tag("body", *body),
        lang="en",
    )


def style_text() -> Markup:
    return Markup(_colours() + asset("style.css"))


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _colours() -> str:
    def rules(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    light = f"color-scheme:light;{rules(palette.LIGHT)}"
    dark = f"color-scheme:dark;{rules(palette.DARK)}"
    return (
        f":root{{{light}}}\n"
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
        f':root[data-theme="light"]{{{light}}}\n:root[data-theme="dark"]{{{dark}}}\n'
        f"@media print{{:root,:root[data-theme]{{{light}}}}}\n"
    )


def asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
