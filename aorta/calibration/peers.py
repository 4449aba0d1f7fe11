"""Gives the traced steps of a rank to those that calibrate together with it, through the job's store.

Whoever reaches the store's port may put anything there, so what comes from it is data of known types and of a
bounded size, never a pickle.
"""

import logging
import time
import zlib
from collections.abc import Sized
from datetime import timedelta
from itertools import starmap

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch._C._distributed_c10d import PrefixStore, Store

from aorta.records.schema import Source, StepRecord
from aorta.steps.calibration import CallError, TracedStep
from aorta.timeline.types import Timeline

log = logging.getLogger(__name__)

NUM_PEERS = 8
"""Ranks that calibrate together."""
MOST_STEPS = 12
"""Traced steps of a rank that its peers get, spread over the run."""
FEW_STEPS, MANY_RANKS = 3, 64
"""Steps that a rank gives in jobs of more ranks than this, whose store serves all of them at once."""
MOST_RANKS = 1024
"""Ranks above which each calibrates by its own steps."""
PATIENCE_S = 120.0
"""Seconds to wait for peers that still read their traces, and again for those that still fetch."""
MOST_BYTES = 1 << 27
"""Of a rank's steps, unpacked: 12 steps of 10 000 collectives and 100 000 kernels take a half of it."""


def peers_of(rank: int, world_size: int) -> range:
    """The ranks that calibrate together, this one included."""
    first = rank - rank % NUM_PEERS
    return range(first, min(first + NUM_PEERS, world_size))


def some_of(traced: list[TracedStep], world_size: int = 1) -> list[TracedStep]:
    """The steps that a rank gives its peers: as many as a job of this size exchanges, evenly spread."""
    max_steps = MOST_STEPS if world_size <= MANY_RANKS else FEW_STEPS
    if len(traced) <= max_steps:
        return traced
    return [traced[i * len(traced) // max_steps] for i in range(max_steps)]


class Peers:
    """Exchanges traced steps with the ranks that calibrate with this one, through the job's store."""

    def __init__(self, store: Store, rank: int, world_size: int, patience_s: float = PATIENCE_S) -> None:
        self._store = PrefixStore("aorta/traced", store)
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s

    def traced_with(self, traced: list[TracedStep]) -> list[TracedStep]:
        """The steps of this rank and its peers, without those of peers that are late or gone.

        Every rank of the job calls it once. Rank 0, which may serve the store, returns when all ranks have
        what they need or its patience ends.
        """
        shared_steps = some_of(traced, self._world_size)
        if self._world_size > MOST_RANKS:
            return shared_steps
        until_s = time.monotonic() + self._patience_s
        gathered: list[TracedStep] = []
        try:
            self._store.set(str(self._rank), packed(shared_steps))  # type: ignore[arg-type]
            for peer in peers_of(self._rank, self._world_size):
                gathered += shared_steps if peer == self._rank else self._steps_of(peer, until_s)
            self._leave()
        except RuntimeError as error:  # the store is gone
            log.warning("rank %d: calibrated by fewer ranks than it could be: %s", self._rank, error)
        return gathered or shared_steps

    def _steps_of(self, peer: int, until_s: float) -> list[TracedStep]:
        left_s = max(0.1, until_s - time.monotonic())
        try:
            self._store.wait([str(peer)], timedelta(seconds=left_s))
        except RuntimeError:  # timed out, by its name in this version of torch
            log.warning("rank %d: rank %d has not given its traced steps", self._rank, peer)
            return []
        try:
            return unpacked(self._store.get(str(peer)))
        except ValueError as error:
            log.warning("rank %d: what rank %d gave are no traced steps: %s", self._rank, peer, error)
            return []

    def _leave(self) -> None:
        # Rank 0's process may serve the store: it must not end before the others have read from it.
        num_done = self._store.add("done", 1)
        until_s = time.monotonic() + self._patience_s
        while self._rank == 0 and num_done < self._world_size and time.monotonic() < until_s:
            time.sleep(0.02)
            num_done = self._store.add("done", 0)


# -- steps as bytes ------------------------------------------------------------------------------------


class _Kernels(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A Timeline, its arrays as lists."""

    rank: int
    step: int | None
    source: Source
    origin_unix_ns: int
    window_ms: tuple[float, float]
    start_ms: list[float]
    end_ms: list[float]
    kind: list[int]
    stream: list[int]
    op: list[int]
    name: list[int]
    streams: tuple[str, ...]
    ops: tuple[str, ...]
    names: tuple[str, ...]
    compute_streams: list[int]
    sees_copies: bool


class _Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    record: StepRecord
    kernels: _Kernels
    calls: list[tuple[int, float, float]]


def packed(steps: list[TracedStep]) -> bytes:
    """The steps as `unpacked` reads them."""
    rows = [_Step(step.record, _listed(step.kernels), list(starmap(_call, step.calls))) for step in steps]
    return zlib.compress(msgspec.msgpack.encode(rows), 1)


def unpacked(data: bytes) -> list[TracedStep]:
    """The steps that a rank has packed; ValueError for anything else, and beyond MOST_BYTES."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof:
        raise ValueError(f"cut off, or more than {MOST_BYTES >> 20} MB")
    try:
        rows = msgspec.msgpack.decode(plain, type=list[_Step])
        return [TracedStep(row.record, _timeline(row), list(starmap(CallError, row.calls))) for row in rows]
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _call(place: int, start_ms: float, end_ms: float) -> tuple[int, float, float]:
    return place, start_ms, end_ms


def _listed(kernels: Timeline) -> _Kernels:
    values = {name: getattr(kernels, name) for name in _Kernels.__struct_fields__}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = value.tolist()
    return _Kernels(**values | {"compute_streams": sorted(kernels.compute_streams)})


def _timeline(row: _Step) -> Timeline:
    """Raises ValueError where lists do not fit each other or name what is not there."""
    kernels = row.kernels
    num_calls = len(row.record.collectives or ())
    if any(not 0 <= place < num_calls for place, _, _ in row.calls):
        raise ValueError("a call that is not in its record")
    lists: tuple[Sized, ...] = (
        kernels.start_ms,
        kernels.end_ms,
        kernels.kind,
        kernels.stream,
        kernels.op,
        kernels.name,
    )
    if len(set(map(len, lists))) != 1:
        raise ValueError("lists of several lengths")
    return Timeline(
        rank=kernels.rank,
        step=kernels.step,
        source=kernels.source,
        origin_unix_ns=kernels.origin_unix_ns,
        window_ms=kernels.window_ms,
        start_ms=np.array(kernels.start_ms, dtype=np.float64),
        end_ms=np.array(kernels.end_ms, dtype=np.float64),
        kind=np.array(kernels.kind, dtype=np.int8),
        stream=_places(kernels.stream, kernels.streams),
        op=_places(kernels.op, kernels.ops),
        name=_places(kernels.name, kernels.names),
        streams=kernels.streams,
        ops=kernels.ops,
        names=kernels.names,
        compute_streams=frozenset(kernels.compute_streams),
        sees_copies=kernels.sees_copies,
    )


def _places(places: list[int], table: tuple[str, ...]) -> NDArray[np.int32]:
    if places and not (min(places) >= 0 and max(places) < len(table)):
        raise ValueError(f"a name that is not in its table of {len(table)}")
    return np.array(places, dtype=np.int32)
