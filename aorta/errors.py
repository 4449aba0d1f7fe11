"""What a user of aorta can fix. Everything else is a bug and keeps its traceback."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import msgspec

    NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)
    """What msgspec.json raises of bytes or texts that are no JSON, or not of the type that was asked for."""
else:

    def __getattr__(name: str) -> Any:
        if name != "NOT_JSON":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import msgspec  # 15 ms that `aorta --help` would wait for

        return msgspec.DecodeError, UnicodeError, RecursionError


class AortaError(Exception):
    """One line: what is wrong, where, and what would work. Commands print it and exit 2."""


class ConfigError(AortaError):
    """A setting that is unknown, of the wrong type, or impossible with the others."""


class RecordError(AortaError):
    """A file of records that cannot be read, or a place where none can be written."""


class TraceError(AortaError):
    """A trace that is not one, is damaged, or lacks what the reader needs."""


class ReportError(AortaError):
    """A report that cannot be made from what was given."""


class ReplayError(AortaError):
    """A what-if that is not one, or that the traces at hand cannot answer."""


class InstrumentError(AortaError):
    """The instrument cannot be installed or used like this."""


class ProjectionError(AortaError):
    """A projection that cannot be made from this hardware, kernel or layout."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a message about an unknown name: the nearest known one, or `otherwise`."""
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean '{near[0]}'?" if near else otherwise
