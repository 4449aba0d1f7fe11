"""Errors that a user of aorta can fix, printable text of them, and the exit codes of every command."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import msgspec

    NOT_JSON = (msgspec.DecodeError, UnicodeError, RecursionError)
    """Errors of msgspec.json for bytes or texts that are no JSON, or not of the type that was asked for."""
else:

    def __getattr__(name: str) -> Any:
        if name != "NOT_JSON":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import msgspec  # 15 ms that `aorta --help` would wait for

        return msgspec.DecodeError, UnicodeError, RecursionError


class AortaError(Exception):
    """One line that says what is wrong, where, and what would work. Commands print it and exit 2."""


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


FINE = 0
"""The command did what was asked; every limit holds."""
VIOLATED = 1
"""A limit is violated, or a difference was found where the command was asked to fail on it."""
BAD_INPUT = 2
"""An option, a file or the machine does not allow it. One line on stderr says what would work."""
CANNOT_TELL = 3
"""Nothing is violated, but the data do not suffice to say that all is fine."""
INTERRUPTED = 130
"""The command was ended by Ctrl-C (128 + SIGINT)."""

EXIT_CODES = {
    "met": FINE,
    "violated": VIOLATED,
    "not judged": CANNOT_TELL,
    "no regression": FINE,
    "regression": VIOLATED,
    "cannot tell": CANNOT_TELL,
}
"""Exit codes by the verdict on all limits of a budget, or on all metrics of two results with a threshold.
A comparison of runs without limits says better, worse, the same or cannot tell of each metric;
its exit code is FINE unless --fail-on-difference is given."""


REPORT = ("isal", "matplotlib", "pandas", "plotly", "pyarrow", "PyYAML", "rich", "scipy", "tensorboard")
"""What reading records and traces needs, and recording does not: the extra `report` of pyproject.toml."""
_REQUIREMENTS = {
    "dask": "dask[distributed]",
    "opentelemetry": "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
    "pynvml": "nvidia-ml-py",
    "yaml": "PyYAML",
}


def printable(text: str) -> str:
    """The text with control characters spelled out: names in records and traces must not move the cursor of a
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def to_install(module: str) -> str:
    """The command that brings a module, and with one package of reports all of them.

    It never names aorta: the package of that name on the public index is another project's.
    """
    package = module.partition(".")[0]
    requirement = _REQUIREMENTS.get(package, package)
    return f"pip install {' '.join(REPORT) if requirement in REPORT else requirement}"


def not_installed(error: ImportError) -> str | None:
    """The line for a user whose environment lacks a package of aorta's extras; None for any other error."""
    package = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or _REQUIREMENTS.get(package, package) not in REPORT:
        return None
    return (
        f"{package} is not installed, and reports need it: pip install '.[report]' in aorta's checkout,"
        f" or {to_install(package)}"
    )
