"""Opens sinks by KIND=TARGET and feeds them from one thread."""

import importlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from aorta.errors import ConfigError, did_you_mean
from aorta.records.schema import StepRecord

KINDS = {
    "prometheus": "aorta.sinks.prometheus",
    "tensorboard": "aorta.sinks.tensorboard",
    "opentelemetry": "aorta.sinks.opentelemetry",
    "wandb": "aorta.sinks.wandb",
    "mlflow": "aorta.sinks.mlflow",
}
"""Module of each kind. It has open_sink(target, rank, world_size) -> Sink, and EVERY_RANK: True if all ranks
send their numbers, False if rank 0 alone does."""

MOST_WAITING = 1000
"""Records that wait for slow sinks; more are left out."""


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
    return kind, target


def open_sinks(targets: Iterable[str], rank: int, world_size: int, say: Callable[[str], None]) -> "Sinks":
    """Sinks of this rank. say: called with one line for each sink that cannot be opened or fails."""
    sinks: dict[str, Sink] = {}
    for text in targets:
        kind, target = check_target(text)
        module = importlib.import_module(KINDS[kind])
        if rank != 0 and not module.EVERY_RANK:
            continue
        try:
            sinks[text] = module.open_sink(target, rank, world_size)
        except ImportError as error:
            say(f"--to {text}: {error.name or error} is not installed; pip install {module.PACKAGE}")
        except Exception as error:
            say(f"--to {text}: {type(error).__name__}: {error}")
    return Sinks(sinks, say)


class Sinks:
    """All sinks of a rank, fed by one thread through a queue, so that `add` never blocks."""

    def __init__(self, sinks: dict[str, Sink], say: Callable[[str], None]) -> None:
        self._sinks = sinks
        self._say = say
        self._records: queue.Queue[StepRecord | None] = queue.Queue(MOST_WAITING)
        self.num_left_out = 0
        self._thread = threading.Thread(target=self._run, name="aorta-sinks", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Hand a record over; it is left out where the sinks are too slow."""
        if self._sinks:
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
        while (record := self._records.get()) is not None:
            for name, sink in list(self._sinks.items()):
                self._try(name, sink.add, record)
        for name, sink in list(self._sinks.items()):
            self._try(name, sink.close)

    def _try(self, name: str, act: Callable[..., None], *arguments: StepRecord) -> None:
        try:
            act(*arguments)
        except Exception as error:
            self._sinks.pop(name, None)
            self._say(f"--to {name} gets nothing more: {type(error).__name__}: {error}")
