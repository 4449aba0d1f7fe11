"""NCCL's or RCCL's own events of every collective, collected by native/collective_events.c.

The library loads a profiler plugin when it makes its first communicator, from the path in
NCCL_PROFILER_PLUGIN. `configure` names ours there before that. Where it cannot be used,
LibraryEventsUnavailable says why in one line, and the environment stays as it was.
"""

import ctypes
import os
from collections.abc import MutableMapping
from pathlib import Path

import numpy as np

from aorta.device.native.build import NativeError, library_path, load_path
from aorta.errors import AortaError
from aorta.steps.raw import EVENT_DTYPE

VARIABLE = "NCCL_PROFILER_PLUGIN"
DEFAULT_PLUGIN = "libnccl-profiler.so"
"""The plugin that NCCL and RCCL load where the variable is not set, if it exists."""
MOST_PATH_BYTES = 254
"""NCCL cuts longer paths of plugins off."""
MOST_TAKEN = 1 << 12
"""Events that one `take` gives at most."""
CONFIG_FILES = ("/etc/nccl.conf", "~/.nccl.conf")
"""Files in which NCCL looks for variables that the environment lacks."""


class LibraryEventsUnavailable(AortaError):
    """Raised when the plugin cannot be used; the message is one line and says why."""


class _Taken(ctypes.Structure):
    _fields_ = (
        ("num_taken", ctypes.c_uint64),
        ("num_lost", ctypes.c_uint64),
        ("complete_ns", ctypes.c_int64),
        ("num_names", ctypes.c_uint32),
        ("num_communicators", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("is_recording", ctypes.c_uint32),
    )


class CollectiveEvents:
    """The plugin's events in this process; it has one memory for them, whoever loaded it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        if library.aorta_collectives_event_bytes() != EVENT_DTYPE.itemsize:
            raise LibraryEventsUnavailable("the library was built from another version of its source")
        library.aorta_collectives_name.restype = ctypes.c_char_p
        self._library = library
        self._buffer = np.zeros(MOST_TAKEN, EVENT_DTYPE)
        self._taken = _Taken()

    def record(self, wanted: bool) -> None:
        """Record collectives launched from now on, or stop that. Takes effect at once; costs nothing."""
        self._library.aorta_collectives_record(1 if wanted else 0)

    def take(self, given_up_ns: int = 0) -> bytes:
        """The oldest events that have ended, at most MOST_TAKEN rows of EVENT_DTYPE.

        given_up_ns: events launched before this monotonic time are given as they are, ended or not.
        """
        self._library.aorta_collectives_take(
            ctypes.c_void_p(self._buffer.ctypes.data),
            ctypes.c_uint64(MOST_TAKEN),
            ctypes.c_int64(given_up_ns),
            ctypes.byref(self._taken),
        )
        return self._buffer[: self._taken.num_taken].tobytes()

    # Results of the last `take`:

    @property
    def complete_ns(self) -> int:
        """Monotonic time; everything launched before it has been taken. 0: not known."""
        return int(self._taken.complete_ns)

    @property
    def num_lost(self) -> int:
        return int(self._taken.num_lost)

    @property
    def num_names(self) -> int:
        return int(self._taken.num_names)

    @property
    def num_communicators(self) -> int:
        return int(self._taken.num_communicators)

    @property
    def version(self) -> int:
        """Version of the profiler interface that the library chose; 0: it has not loaded the plugin."""
        return int(self._taken.version)

    def names(self, first: int, end: int) -> list[str]:
        return [
            self._library.aorta_collectives_name(ctypes.c_uint32(i)).decode("utf-8", "replace")
            for i in range(first, end)
        ]


def configure(environ: MutableMapping[str, str]) -> Path:
    """Name the plugin in an environment, for programs that make communicators under it; returns its path.

    Raises LibraryEventsUnavailable where it cannot be built or another plugin is configured, which keeps its
    place.
    """
    try:
        path = library_path("collective_events")
    except NativeError as error:
        raise LibraryEventsUnavailable(str(error)) from None
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        raise LibraryEventsUnavailable(f"NCCL takes paths of plugins up to {MOST_PATH_BYTES} bytes: {path}")
    _check_others(path, environ)
    environ[VARIABLE] = str(path)
    return path


def open_events() -> CollectiveEvents:
    """The plugin's events in this process, whose environment names it from now on."""
    path = configure(os.environ)
    try:
        return CollectiveEvents(load_path(path))
    except NativeError as error:
        raise LibraryEventsUnavailable(str(error)) from None


def _check_others(path: Path, environ: MutableMapping[str, str]) -> None:
    """Raise LibraryEventsUnavailable where NCCL would load another profiler: that one keeps its place."""
    chosen = environ.get(VARIABLE)
    if chosen is not None:
        if chosen != str(path):
            raise LibraryEventsUnavailable(f"{VARIABLE} names another profiler, {chosen}")
        return
    for name in (environ.get("NCCL_CONF_FILE"), *CONFIG_FILES):
        if name and VARIABLE in _text_of(Path(name).expanduser()):
            raise LibraryEventsUnavailable(f"{name} names another profiler in {VARIABLE}")
    try:
        ctypes.CDLL(DEFAULT_PLUGIN)  # NCCL would load it too
    except OSError:
        return
    raise LibraryEventsUnavailable(
        f"another profiler is installed where NCCL looks for one, {DEFAULT_PLUGIN}"
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
