"""What a test's code logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class LogRecords(logging.Handler):
    """The records that reach the root logger, as pytest's own caplog has them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.setFormatter(logging.Formatter("%(levelname)-8s %(name)s:%(filename)s:%(lineno)d %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def messages(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    @property
    def text(self) -> str:
        return "".join(f"{self.format(record)}\n" for record in self.records)

    @contextmanager
    def at_level(self, level: int | str, logger: str | None = None) -> Iterator[None]:
        of = logging.getLogger(logger)
        before = of.level
        of.setLevel(level)
        try:
            yield
        finally:
            of.setLevel(before)
