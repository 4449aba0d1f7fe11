"""Findings that are known to be harmless: a file that ships with reasons, and files of users."""

import re
from pathlib import Path

import msgspec

from aorta.config.yaml_files import read_structs
from aorta.errors import ConfigError
from aorta.hazards.findings import Finding, Site

SHIPPED = Path(__file__).with_name("exceptions.yaml")


class _Exception(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    reason: str
    operation: str = ""
    where: str = ""

    def fits(self, site: Site) -> bool:
        place = f"{site.where}\n{site.inside}"
        return bool(re.search(self.operation, site.operation) and re.search(self.where, place))


class Exceptions:
    """Known exceptions, asked in the order in which they were given."""

    def __init__(self, entries: list[_Exception]) -> None:
        self._entries = entries

    @classmethod
    def shipped(cls, path: Path | str | None = None) -> "Exceptions":
        """Those that ship, behind those of a user's file. Raises ConfigError where that is none."""
        return cls([*(_read(path) if path is not None else ()), *_read(SHIPPED)])

    def reason(self, finding: Finding) -> str | None:
        """Why the finding is harmless; None where no exception names it."""
        for entry in self._entries:
            if entry.fits(finding.earlier.site) or entry.fits(finding.later.site):
                return entry.reason
        return None


def _read(path: Path | str) -> list[_Exception]:
    entries = read_structs(path, list[_Exception])
    for number, entry in enumerate(entries, start=1):
        if not (entry.operation or entry.where) or not entry.reason.strip():
            raise ConfigError(f"{path}: entry {number} needs a reason, and operation or where")
        for text in (entry.operation, entry.where):
            try:
                re.compile(text)
            except re.error as error:
                raise ConfigError(
                    f"{path}: entry {number}: {text!r} is no regular expression: {error}"
                ) from None
    return entries
