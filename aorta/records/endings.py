"""Who ended an attempt of a run, and how: the first failure, not what followed from it.

Told by the ranks themselves, by the kernel (aorta.records.deaths) and by launchers (aorta.records.launches).
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from aorta.records.deaths import ending_of_status
from aorta.records.launches import LaunchNote
from aorta.records.schema import Ending
from aorta.records.state import RankState

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)|timed? ?out"
    r"|remote (process|error)|peer|rendezvous|connectFullMesh|NCCL|store",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out|timing out|timeout", re.IGNORECASE)
_DIST_ERRORS = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "BrokenPipeError",
    "ConnectionResetError",
)
_FROM_OUTSIDE = ("SIGTERM", "SIGKILL", "SIGINT", "SIGHUP")
"""Signals by which a launcher ends the ranks that are left."""
_MEANING = {
    "SIGKILL": "nobody says who sent it: the out-of-memory killer, a scheduler, kill -9",
    "SIGTERM": "somebody ended it",
    "SIGINT": "Ctrl-C",
    "SIGSEGV": "a fault in native code",
    "SIGBUS": "memory that is not there: shared memory or a disk may be full",
    "SIGABRT": "native code gave up",
    "SIGFPE": "a fault in native code",
    "SIGILL": "an instruction that this processor does not have",
}
_NO_WORD = "left no word: SIGKILL, out of memory or a lost machine"
_MOST_RANKS = 6
_KILL_AFTER_NS = 5_000_000_000
"""Launchers send SIGKILL where SIGTERM did not help for a while; an earlier one is of somebody else."""
_TOGETHER_NS = 200_000_000
"""Time between an event and what its launcher notes of it."""


class _Row(NamedTuple):
    rank: int
    ending: Ending | None
    """By its own word, the kernel's, or the launcher's."""
    state: RankState

    @property
    def at_ns(self) -> float:
        return float("inf") if self.ending is None or self.ending.unix_ns is None else self.ending.unix_ns


def attempt_ending(
    states: Iterable[RankState],
    world_size: int,
    is_over: bool = False,
    notes: Sequence[LaunchNote] = (),
) -> Ending | None:
    """How these ranks' attempt ended; None while it runs, and where no rank tells.

    is_over: its processes cannot be alive, even if their states look so. notes: of launchers.

    A rank's own exception, a death by a signal or a status: the first of them counts. Exceptions that say
    that a peer is gone are a consequence, and so are signals that a launcher sends to the ranks that are
    left. Where ranks waited in vain, those that never came have hung.
    """
    ordered = sorted(states, key=lambda state: state.rank)
    rows = [_Row(state.rank, _ending_of(state, notes), state) for state in ordered]
    if not rows:
        return None
    silent = [row for row in rows if row.ending is None and (is_over or row.state.is_alive is not True)]
    num_running = sum(row.ending is None for row in rows) - len(silent)
    hung = [row for row in rows if row.ending is not None and row.ending.kind == "hung"]
    failed = [row for row in rows if _is_own_failure(row.ending)]
    if num_running and not (hung or failed):
        return None
    started_ns = min(state.process.started_unix_ns for state in ordered)
    failed_ns = min((row.at_ns for row in [*hung, *failed]), default=float("inf"))
    stop = _stopped_from_outside(notes, started_ns, failed_ns)
    if stop is not None and any(row.ending is None or row.ending.kind != "finished" for row in rows):
        return stop
    first = min(failed, key=lambda row: row.at_ns, default=None)
    if hung and not (first is not None and first.at_ns < min(row.at_ns for row in hung)):
        gone_before = [row for row in silent if _closed_ns(row.state) < min(one.at_ns for one in hung)]
        if gone_before:
            return _killed(gone_before, len(rows))
        # Every watchdog may have written a reason; the one that says most counts.
        _, ending, _ = max(hung, key=lambda row: (len(_of(row).ranks) > 0, len(_of(row).why or "")))
        assert ending is not None
        return _first("hung", hung, ending.why, ending.ranks)
    return _by_first_failure(rows, silent, world_size, notes)


def _by_first_failure(
    rows: list[_Row], silent: list[_Row], world_size: int, notes: Sequence[LaunchNote]
) -> Ending | None:
    ended = [row for row in rows if row.ending is not None]
    consequences = [row for row in ended if _is_consequence(row.ending)]
    earliest = min((row.at_ns for row in consequences), default=float("inf"))
    failed = [row for row in ended if _is_own_failure(row.ending) and not _is_answer(row, earliest, notes)]
    if failed:
        first = min(failed, key=lambda row: row.at_ns)
        pids = {row.state.process.pid for row in rows}
        named = next((event for event in notes if event.kind == "failure" and event.pid in pids), None)
        if all(_of(row).signal in _FROM_OUTSIDE for row in failed) and len(failed) == len(rows) > 1:
            if named is None:
                return _first("stopped", failed, f"{_of(first).signal} of all ranks", [])
            first = next((row for row in failed if row.state.process.pid == named.pid), first)
        return _explained(first)
    waited = [row for row in consequences if _TIMEOUT.search(_reason(row))]
    absent = [row for row in rows if row not in consequences]
    if waited and absent and not any(_of(row).kind == "finished" for row in absent if row.ending is not None):
        why = f"rank {waited[0].rank} waited in vain: {_reason(waited[0])}"
        return _first("hung", waited, why, [row.rank for row in absent])
    left = [row for row in ended if _of(row).kind == "finished" and row.at_ns < earliest]
    if consequences and left:
        first = min(left, key=lambda row: row.at_ns)
        why = "left with exit status 0 while the other ranks went on"
        return Ending(kind="crashed", why=why, ranks=[first.rank], unix_ns=_of(first).unix_ns, exit_status=0)
    if silent:
        return _killed(silent, len(rows))
    if consequences:
        return _explained(min(consequences, key=lambda row: row.at_ns))
    stopped = [row for row in ended if _of(row).kind == "stopped"]
    if stopped:
        return _first("stopped", stopped, _of(stopped[0]).why, [])
    if len(ended) == world_size:
        latest = max((_of(row).unix_ns or 0 for row in ended), default=0)
        return Ending(kind="finished", unix_ns=latest or None)
    return None


def lost_a_peer(reason: str | None) -> bool:
    """Return True for an exception that says that another rank is gone: look at that one."""
    kind, _, text = (reason or "").partition(":")
    if kind in _DIST_ERRORS:
        return True
    return kind in ("RuntimeError", "DistError", "TimeoutError") and _LOST_PEER.search(text) is not None


def _of(row: _Row) -> Ending:
    assert row.ending is not None
    return row.ending


def _reason(row: _Row) -> str:
    return (row.ending and (row.ending.why or row.ending.text)) or ""


def _is_consequence(ending: Ending | None) -> bool:
    """Return True where the rank says that it ended since another one was gone, or did not come."""
    if ending is None or ending.kind not in ("crashed", "killed"):
        return False
    told = ending.text or ""
    return lost_a_peer(ending.why) or (ending.signal == "SIGABRT" and _LOST_PEER.search(told) is not None)


def _is_answer(row: _Row, earliest_ns: float, notes: Sequence[LaunchNote]) -> bool:
    """Return True for a rank that its launcher ended, since another one had failed before.

    earliest_ns: when the first rank said that a peer is gone.
    """
    ending = _of(row)
    if ending.signal not in _FROM_OUTSIDE:
        return False
    pid = row.state.process.pid
    for event in notes:
        if event.kind == "failure" and (event.pid, event.host) == (pid, row.state.process.host):
            return event.is_sent
    return row.at_ns > earliest_ns + (_KILL_AFTER_NS if ending.signal == "SIGKILL" else 0)


def _is_own_failure(ending: Ending | None) -> bool:
    return ending is not None and ending.kind in ("crashed", "killed") and not _is_consequence(ending)


def _ending_of(state: RankState, notes: Sequence[LaunchNote]) -> Ending | None:
    own = state.process.ending
    if own is not None and not (own.kind == "finished" and _status_of(state, notes)):
        return own
    if state.lines is not None and state.lines.ending is not None:
        return state.lines.ending
    closed_ns = _closed_ns(state)
    for event in notes:
        if event.kind != "signal" and (event.pid, event.host) == (state.process.pid, state.process.host):
            at_ns = event.unix_ns if closed_ns == float("inf") else int(min(closed_ns, event.unix_ns))
            if event.code == 0:
                return Ending(kind="finished", unix_ns=at_ns, exit_status=0, told_by="aorta run")
            return ending_of_status(event.code, "the launcher", at_ns, event.why, event.text)
    return None


def _status_of(state: RankState, notes: Sequence[LaunchNote]) -> int:
    """The exit code that its launcher saw; 0 where it saw none, or had begun to end its processes."""
    process = state.process
    return next(
        (
            event.code
            for event in notes
            if event.kind == "failure"
            and not event.is_sent
            and (event.pid, event.host) == (process.pid, process.host)
        ),
        0,
    )


def _stopped_from_outside(notes: Sequence[LaunchNote], started_ns: int, failed_ns: float) -> Ending | None:
    """The signal that was sent to the whole command before any rank had failed by itself."""
    for event in notes:
        if event.kind == "signal" and started_ns < event.unix_ns <= failed_ns + _TOGETHER_NS:
            why = f"{event.signal}, sent to the command" + (" (Ctrl-C)" if event.signal == "SIGINT" else "")
            return Ending(
                kind="stopped", why=why, unix_ns=event.unix_ns, signal=event.signal, told_by="aorta run"
            )
    return None


def _explained(row: _Row) -> Ending:
    """The rank's ending, with a reason that says what its signal or status means."""
    ending = _of(row)
    return msgspec.structs.replace(ending, ranks=[row.rank], why=why_of(ending))


def why_of(ending: Ending) -> str | None:
    """The reason in words, of an ending by a signal or a status too."""
    if ending.why is not None:
        return ending.why
    if ending.signal is not None:
        meaning = ending.text or _MEANING.get(ending.signal)
        return ending.signal if meaning is None else f"{ending.signal}: {meaning}"
    if ending.exit_status is not None:
        return f"exit status {ending.exit_status}, without an exception"
    return None


def _closed_ns(state: RankState) -> float:
    """Unix ns at which the writing process saw the rank end; infinity where it did not."""
    closed_ns = None if state.lines is None else state.lines.closed_unix_ns
    return float("inf") if closed_ns is None else closed_ns


def _first(kind: str, rows: list[_Row], reason: str | None, ranks: list[int]) -> Ending:
    unix_ns = min((int(row.at_ns) for row in rows if row.at_ns != float("inf")), default=None)
    return Ending(kind=kind, why=reason, ranks=ranks, unix_ns=unix_ns)  # type: ignore[arg-type]


def _killed(silent: list[_Row], num_ranks: int) -> Ending:
    """The ending of ranks of which nobody tells how they ended.

    Where all their ends were seen, the first rank counts: the launcher ended the others.
    """
    last_seen = {row.rank: _closed_ns(row.state) for row in silent if _closed_ns(row.state) != float("inf")}
    ranks = [row.rank for row in silent]
    if len(last_seen) == len(silent):
        ranks = [min(last_seen, key=lambda rank: last_seen[rank])]
    reason = "all ranks ended without a word" if len(ranks) == num_ranks > 1 else _NO_WORD
    unix_ns = int(min(last_seen.values())) if last_seen else None
    return Ending(kind="killed", why=reason, ranks=ranks, unix_ns=unix_ns)


def ending_text(ending: Ending, suffix: str = "") -> str:
    """The ending in words: what happened, on which ranks, and why. suffix: goes before the reason."""
    ranks_text = ""
    if ending.ranks:
        rank_list = ", ".join(map(str, ending.ranks[:_MOST_RANKS])) + (
            ", ..." if len(ending.ranks) > _MOST_RANKS else ""
        )
        ranks_text = f" on rank {rank_list}" if len(ending.ranks) == 1 else f" on ranks {rank_list}"
    if ending.kind == "stopped":
        return (f"stopped by {ending.why}" if ending.why else "stopped") + suffix
    why = why_of(ending)
    return f"{ending.kind}{ranks_text}{suffix}" + (f": {why}" if why else "")
