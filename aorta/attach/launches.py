"""Notes in torchrun's agent how its processes failed (aorta.records.launches)."""

import weakref
from typing import Any

from aorta.records.deaths import Log, is_of_native_code, signal_name
from aorta.records.launches import note, own_notes
from aorta.records.secrets import redacted

closing: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Contexts of the agent that have begun to end their processes."""
log = Log()
"""Standard error from the start of the agent's latest processes on."""
_FRAMES = 8
"""Callers of a failure's constructor among which the agent's own context is."""


def note_failure(failure: Any, frame: Any) -> None:
    """Note a failure that the agent has just learned of. frame: of its constructor, or below it."""
    path = own_notes()
    if path is None:
        return
    environment: dict[str, str] = {}
    context = None
    for _ in range(_FRAMES):
        if frame is None:
            break
        context = frame.f_locals.get("self")
        environments = getattr(context, "envs", None)
        if isinstance(environments, dict) and failure.local_rank in environments:
            environment = environments[failure.local_rank]
            break
        frame = frame.f_back
    rank, restarts = environment.get("RANK", ""), environment.get("TORCHELASTIC_RESTART_COUNT", "")
    note(
        path,
        "failure",
        code=int(failure.exitcode),
        pid=int(failure.pid),
        rank=int(rank) if rank.isdecimal() else None,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        is_sent=context in closing,
        text=_last_words(int(failure.exitcode), rank),
        why=_told(failure.error_file_data),
    )


def _last_words(code: int, rank: str) -> str | None:
    """What native code wrote before it ended this process: the agent writes to the same log as its ranks."""
    text = None
    if code < 0 and is_of_native_code(signal_name(-code)):
        text = log.last_words(int(rank) if rank.isdecimal() else 0)
    return text


def _told(data: Any) -> str | None:
    """Type and first line of the exception in torch's error file; None where there is none."""
    message = data.get("message") if isinstance(data, dict) else None
    text = message.get("message") if isinstance(message, dict) else None
    lines = str(text).splitlines() if text else []
    return redacted(lines[0])[:500] if lines else None
