"""Opens sinks by KIND=TARGET and feeds them from one thread."""

import importlib
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from aorta.errors import ConfigError, did_you_mean, to_install
from aorta.launcher import local_rank
from aorta.records.schema import StepRecord

KINDS = {
    "prometheus": "aorta.sinks.prometheus",
    "tensorboard": "aorta.sinks.tensorboard",
    "opentelemetry": "aorta.sinks.opentelemetry",
    "wandb": "aorta.sinks.wandb",
    "mlflow": "aorta.sinks.mlflow",
}
"""Module of each kind. It has open_sink(target, place) -> Sink; RANKS, which ranks open one: "all", "first",
"first of machine"; TAKES_RECORDS: False where the sink reads the lines by itself; and it may have
check_target(target), which raises ConfigError."""

MOST_WAITING = 1000
"""Records that wait for slow sinks; more are left out."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands, and where its lines are."""

    folder: Path
    rank: int
    world_size: int

    def opens(self, ranks: str) -> bool:
        """True where this is one of the ranks that open a sink."""
        return ranks == "all" or (local_rank(self.rank) if ranks == "first of machine" else self.rank) == 0


class Sink(Protocol):
    """Receiver of the numbers of steps. It may raise anything: it then gets nothing more."""

    def add(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def check_target(text: str) -> tuple[str, str]:
    """Kind and target of KIND=TARGET. Raises ConfigError for another form and for unknown kinds."""
    kind, equals, target = text.partition("=")
    if kind not in KINDS:
        otherwise = f"; there is {', '.join(KINDS)}"
        raise ConfigError(f"--to {text}: {kind!r} is no kind of sink{did_you_mean(kind, KINDS, otherwise)}")
    if not equals or not target:
        raise ConfigError(f"--to {text} must look like {kind}=TARGET")
    check = getattr(importlib.import_module(KINDS[kind]), "check_target", None)
    if check is not None:
        check(target)
    return kind, target


class Sinks:
    """All sinks of a rank, opened and fed by one thread through a queue, so that `add` never blocks."""

    def __init__(self, targets: Iterable[str], place: Place, say: Callable[[str], None]) -> None:
        """say: called with one line for each sink that cannot be opened or fails."""
        self._place = place
        self._say = say
        self._records: queue.Queue[StepRecord | None] = queue.Queue(MOST_WAITING)
        self.num_left_out = 0
        self._to_open: list[tuple[str, str, ModuleType]] = []
        for text in targets:
            kind, target = check_target(text)
            module = importlib.import_module(KINDS[kind])
            if place.opens(module.RANKS):
                self._to_open.append((text, target, module))
        self.takes_records = any(module.TAKES_RECORDS for _, _, module in self._to_open)
        """False where `add` is not needed."""
        self._sinks: dict[str, Sink] = {}
        self._thread = threading.Thread(target=self._run, name="aorta-sinks", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Hand a record over; it is left out where the sinks are too slow."""
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.num_left_out += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Send what is left within timeout_s and close the sinks."""
        try:
            self._records.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        if self.num_left_out:
            self._say(f"--to: {self.num_left_out} steps were left out, the sinks were too slow")

    def _run(self) -> None:
        for text, target, module in self._to_open:
            self._open(text, target, module)
        while (record := self._records.get()) is not None:
            for name, sink in list(self._sinks.items()):
                self._try(name, sink.add, record)
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _open(self, text: str, target: str, module: ModuleType) -> None:
        """Open a sink here and not on the thread that trains: its package may take seconds to import."""
        try:
            self._sinks[text] = module.open_sink(target, self._place)
        except ImportError as error:
            self._say(f"--to {text}: {error.name or error} is not installed; {to_install(module.PACKAGE)}")
        except Exception as error:
            self._say(f"--to {text}: {type(error).__name__}: {error}")

    def _try(self, name: str, act: Callable[..., None], *arguments: StepRecord) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self._sinks.pop(name, None)
            self._say(f"--to {name} gets nothing more: {type(error).__name__}: {error}")
