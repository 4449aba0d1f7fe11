"""Units of FSDP (fully_shard, FullyShardedDataParallel), buckets of DistributedDataParallel, and what fewer
would save.

Each unit costs the host its hooks, copies and launches, and each of its collectives a latency, however few
bytes it has. Units that a module of the next level up holds together would cost that once, and so would
buckets of the default size.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aorta.account.judge.cells import Account, Host
from aorta.account.model import Run
from aorta.account.numbers import quantity
from aorta.records.schema import CollectiveRecord
from aorta.why.causes.finding import CauseFinding

UNIT_OPS = ("all_gather", "reduce_scatter")
"""Of units."""
FEWEST = 8
"""Units of a model, from which on fewer are worth a thought."""
LARGE_BYTES = 10 << 20
"""Of a unit, from which on no larger one is proposed but a level up."""
SMALL_BYTES = 1 << 20
"""Of a unit, below which several of one level are worth joining."""
FEWER = 0.6
"""Part of the units that must be left at most."""
SHORT_PERCENTILE = 25
"""Of the times between the launches of two units: in longer ones the program does something else, too.
Between those of buckets there is nothing but the backward pass: of these it is the median."""
UNIT_KERNELS = 40
"""A unit costs the host, in both passes, what launching so many kernels of operators does. Measured on a slow
host of H100s, 2.5 to 3.2 ms where a kernel took 0.06 to 0.07: 37 of fully_shard, 56 of its predecessor."""

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel makes them by default."""
BUCKET_KERNELS = 4.0
"""The same of a bucket: 2 (of 92 buckets 1.6 by medians, 2.9 by means) of the half that are launched in the
backward pass."""
BUCKET_ERROR = math.log(2.9 / 2)
"""By which, as a logarithm of a ratio, that may be off."""


@dataclass(frozen=True, slots=True)
class Units:
    """Of the steps whose calls were kept."""

    num: int
    bytes: float
    """Of a unit, in the mean, as it is gathered."""
    num_merged: int
    """That would be left."""
    name: str
    """Of most, 'blocks.N.attention.q'."""
    level: str
    """Modules that would be units instead, 'blocks.0, blocks.1, …'; '' where units of one level are to be
    joined."""
    ops: tuple[str, ...] = UNIT_OPS
    kernels: float = UNIT_KERNELS
    """A unit costs the host as much as launching so many kernels of operators does."""

    @property
    def part(self) -> float:
        """Of what units cost, that merging saves."""
        return 1 - self.num_merged / self.num


def units_of(bytes_of: Mapping[str, float]) -> Units | None:
    """None where they are few, or neither small nor held together by a module.

    bytes_of: of each unit, by its name.
    """
    num, total = len(bytes_of), sum(bytes_of.values())
    if num < FEWEST:
        return None
    homes = {name: _outer(name) for name in bytes_of}
    while total < LARGE_BYTES * len(set(homes.values())):
        outer = {name: _outer(home) for name, home in homes.items()}
        if outer == homes:
            break
        homes = outer
    num_merged, level = len(set(homes.values())), ""
    if num_merged <= FEWER * num:
        inner = [home for name, home in homes.items() if home != name]
        usual = _usual(inner)
        alike = [*dict.fromkeys(home for home in inner if _numbered(home) == usual)]
        level = ", ".join(alike[:2]) + ", …"
        num_merged = len(alike) + (len(alike) < num_merged)  # the rest of the model is one unit
    elif total <= SMALL_BYTES * num:
        num_merged = max(1, math.ceil(total / LARGE_BYTES))
    else:
        return None
    return Units(num, total / num, num_merged, _usual(bytes_of), level)


def buckets_of(bytes_of: Mapping[str, float]) -> Units | None:
    """None where those of the default size would not be much fewer. bytes_of: of each bucket."""
    num, total = len(bytes_of), sum(bytes_of.values())
    num_merged = 1 + math.ceil(total / BUCKET_BYTES)  # the first one is made small, so that it goes early
    if num < FEWEST or num_merged > FEWER * num:
        return None
    return Units(num, total / num, num_merged, "", "", ("all_reduce",), BUCKET_KERNELS)


def _outer(name: str) -> str:
    """The innermost numbered module that holds it: 'blocks.3' of 'blocks.3.attention.q'; itself where none
    does."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts[:-1]) if part.isdecimal()), default=None)
    return name if last is None else ".".join(parts[: last + 1])


def _usual(names: Iterable[str]) -> str:
    """'blocks.N.attention.q', as most are called."""
    return Counter(map(_numbered, names)).most_common(1)[0][0]


def _numbered(name: str) -> str:
    return re.sub(r"\b\d+\b", "N", name)


def launch_ms_of_unit(calls: Sequence[CollectiveRecord]) -> float:
    """From the launch of a unit's gather to that of the next one's, and the same of its reduction: what it
    takes the host in both passes, with its own operators. 0 where launches are not known. calls: of units."""
    found = 0.0
    for op in sorted({call.op for call in calls}):
        launches = np.sort([call.launch_ms for call in calls if call.op == op and call.launch_ms is not None])
        if len(launches) >= FEWEST:
            percentile = 50 if op == "all_reduce" else SHORT_PERCENTILE
            found += float(np.percentile(np.diff(launches), percentile))
    return found


def one_unit_text(judged: Run) -> str:
    """What a model that is one unit loses, and what several would cost the host."""
    kernels, step_ms, here = Host(judged, judged.judged_steps).num_kernels, judged.mean_of("step_ms"), ""
    if kernels is not None and step_ms is not None and kernels.mean() > 0:
        here = f", here up to {quantity(UNIT_KERNELS * step_ms / float(kernels.mean()), 'ms')}"
    return (
        "all of the model is one unit, so that nothing is computed before all of it is gathered, its"
        " gradients are reduced behind the whole backward pass, and its weights lie in memory whole; each"
        f" unit costs the host what launching {UNIT_KERNELS} kernels does{here}: where it is hardly ahead of"
        " the device, more of them make a step longer"
    )


def on_host(units: Units, launch_ms: float, judged: Run, account: Account) -> Iterator[CauseFinding]:
    """What devices idle for the host in units that larger ones would not have, and what ranks wait meanwhile
    for the one whose host is slowest.

    launch_ms: from one unit to the next in both passes.
    """
    launch = account.cells.get("launch")
    if launch is None or not launch_ms:
        return
    late = launch
    if account.exposed is not None:
        # The others wait for the slowest host, as much longer as it is in its launches.
        for_slowest = np.minimum(account.cells["wait"], launch.max(axis=0) - launch)
        late = launch + np.maximum(account.exposed.idle_waits_ms, for_slowest)
    kernels = Host(judged, judged.judged_steps).num_kernels
    num_kernels = 0.0 if kernels is None else float(kernels.mean())
    of_unit_ms = launch_ms / (1 + num_kernels / units.num / units.kernels)
    saved_ms = of_unit_ms * (units.num - units.num_merged)
    # Of what is late beside units, their part is left out as well.
    ms = np.minimum(saved_ms, units.part * late.mean(axis=0))
    yield CauseFinding("small_units", ms, {("launch", "wait"): 1.0}, facts={"host_ms": float(ms.mean())})
