"""Where examples and documentation are: beside the package in a checkout, within it in an installation."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def example(name: str) -> Path | None:
    """The path of a program of examples/, or None where it was not installed."""
    return _found(f"examples/{name}")


def documentation() -> Path | None:
    """The path of the documentation's first page, or None where it was not installed."""
    return _found("docs/index.md")


def _found(name: str) -> Path | None:
    return next((path for path in (_PACKAGE / name, _PACKAGE.parent / name) if path.is_file()), None)
