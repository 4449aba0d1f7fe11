"""What a user of aorta can fix. Everything else is a bug and keeps its traceback."""


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


class InstrumentError(AortaError):
    """The instrument cannot be installed or used like this."""


class ProjectionError(AortaError):
    """A projection that cannot be made from this hardware, kernel or layout."""
