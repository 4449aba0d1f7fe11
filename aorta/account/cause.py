"""One reason for the length of a step, as every source of causes gives it and every output shows it."""

import math
from typing import Literal

import msgspec

from aorta.account.numbers import number, percent, quantity
from aorta.records.stacks import Does

CauseKind = Literal[
    "compute",  # kernels of the model itself; on a CPU, a loop over operators that hardly compute
    "transfer",  # communication that no compute hides, after the last rank came
    "late_rank",  # waiting in collectives for a rank that came last
    "launch_bound",  # the device has nothing queued because the host launches too late
    "synchronisation",  # the host waits for the device, and the device then for the host
    "data_loading",  # the next batch is not there yet
    "bubble",  # a pipeline stage has no micro-batch
    "copy",  # copies that nothing hides
    "clock",  # the device runs below its clock
    "memory",  # the allocator had to free its cache, or memory is near its limit
    "wide_dtype",  # collectives move wider elements than the parameters have
    "small_messages",  # collectives so small that their latency is most of their time
    "small_units",  # units of FSDP, each of which costs the host and the network more than its bytes do
    "no_prefetch",  # gathers start after the compute that could have hidden them
    "imbalance",  # ranks have different amounts of work
    "optimizer",  # time after backward that the optimizer takes on the host
    "shared_communicator",  # calls wait for the previous call of their communicator
    "checkpoint",  # the program saves a checkpoint
    "garbage_collection",  # Python collects garbage
    "between_steps",  # time between two step bodies of which nothing else is known
    "pause",  # the program sleeps or pauses, or single steps are much longer than the others
    "core_taken",  # the training threads are ready to run, and others have the cores
    "idle",  # the device has nothing to do, and the source does not show what the host does
    "program_code",  # what the program does in every step outside of its model, loader and optimizer
]

CauseSource = Literal["records", "telemetry"]
"""records: lines of steps. telemetry: samples of the device."""
MENDED_ERROR = 0.3
"""By how much, as a ratio, mending may save more or less than the cells say: what hid behind a loss comes
out, and what is mended seldom goes to 0."""
MENDED_MORE = 0.65
"""By how much more where idle time alone tells the loss: kernels, copies and waits go with it. Of planted
losses mended, nine in ten were within these two; docs/evidence.md says in how many when each was left out."""
MENDED_LESS = 0.65
"""By how much less where what stands in for a loss takes time as well: code of the program is made shorter
or rarer, exposed communication sends less or hides a part, more micro-batches leave some of a bubble; and a
device that idles for its host in other places as well idles there for longer. Of 8 planted ones of own code,
mending saved 0.4 to 1.6 of what was said, 0.7 in the median; of 4 of the last kind 0.55 to 0.9."""
HIDDEN_LESS = 1.1
"""By how much less where a device's kernels have to hide what is exposed: both are slower beside each other.
Of gathers that were hidden in four ways on H200 0.33 to 0.5 was saved."""
WIDEST = 4.0
"""Factor above which an interval tells nothing."""


Limit = Literal["at most", "at least"]
TELLING = 0.5
"""Of the step, below which what it takes at least tells nothing."""


class CodeLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the program, and what was seen there."""

    file: str
    line: int
    function: str
    text: str
    """'augment(), train.py:5'"""
    caller: str = ""
    """The line of another function of the program that called this one, in such words; '' where none did."""
    calls: str = ""
    """The library's function in which it is there: 'sleep of time'; '' where it is in none."""
    entry: str = ""
    """The one that its function itself calls, in most of what is in any."""
    doing: Does = "runs"
    """What the thread did in most of it."""
    ms: float = 0.0
    """Of the mean step, in this function, as sampled."""
    part: float = 0.0
    """Of what was sampled of the loss."""
    lines: tuple[tuple[int, float], ...] = ()
    """Of the function, with a fifth of ms or more, the largest first, each with its part."""
    num_samples: int = 0
    """0: the line that issues the loss's collectives, as call sites tell; ms and part are 0 then."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step, why they are lost, and what would save them."""

    kind: CauseKind
    subject: str
    """What it is about: 'rank 3', 'all_gather of layers.3 (default group)', 'aten::item in train.py:88'."""
    ms: float
    """Milliseconds of the mean step that are at stake. Causes of one run do not overlap."""
    interval_ms: tuple[float, float] | None
    """95 % over steps, or of so many samples, widened by how far mending may be off what the cells say
    (MENDED_ERROR and those beside it)."""
    why_no_interval: str = ""
    """Where interval_ms is None."""
    limit: Limit | None = None
    """Where it is None because ms are the most or the least that mending saves."""
    bound_ms: float | None
    """What a mended step takes at least: without the upper end of the interval, and without what aorta itself
    takes of it. None where there is no interval."""
    share: float
    """ms of the step."""
    evidence: tuple[str, ...]
    """Sentences with numbers, and where to look: rank, step, file."""
    change: str
    """What to set, as the stack at hand spells it."""
    check: str
    """A command that shows whether the change helped."""
    source: CauseSource
    line: CodeLine | None = None
    """Line of the program that it is in, by sampled stacks; None where they do not show one."""
    rank: int | None = None
    """Rank to look at; None where all are alike."""
    origin: str = ""
    """What its remedy is of, as its rule has it, or else op: 'dealt'; '' of one that fits anything."""
    is_in_step: bool = True
    """False: of the time between steps; share is of steps and gaps together, and ms may exceed the step."""
    is_of_trace: bool = False
    """The trace marks no steps: ms, share and bound_ms are of all of it."""
    is_waited_for: bool = False
    """The other ranks wait for it: it is the late one."""
    global_step: int | None = None
    """Step to look at, a typical one; None where none stands for the others."""
    at_ms: tuple[float, float] | None = None
    """Start and end in that step's window on that rank, for a link into the timeline."""

    @property
    def headline(self) -> str:
        """'data loading on rank 1: 20.1 ms a step, 38 % [19, 21] ms; without it a step takes 32 to 34 ms',
        with the interval of what mending saves."""
        if self.ms <= 0:
            return f"{self.subject}: {self.why_no_interval or 'no time is lost yet'}"
        of_what = "of the trace" if self.is_of_trace else "a step" if self.is_in_step else "for each step"
        what = "the trace" if self.is_of_trace else "a step"
        of_run = "" if self.is_in_step else " of the run"
        bound = "" if self.limit is None else f"{self.limit} "
        text = f"{self.subject}: {bound}{number(self.ms)} ms {of_what}, {percent(self.share)}{of_run}"
        if self.interval_ms is None:
            return text
        text += f" [{number(self.interval_ms[0])}, {number(self.interval_ms[1])}] ms"
        if self.bound_ms is not None and self.bound_ms >= TELLING * self.ms / self.share:
            most_ms = self.bound_ms + self.interval_ms[1] - self.interval_ms[0]
            text += f"; without it {what} takes {number(self.bound_ms)} to {quantity(most_ms, 'ms')}"
        return text

    @property
    def place(self) -> str:
        """'rank 1, step 12'; '' where no place stands for it."""
        parts = [f"rank {self.rank}"] if self.rank is not None else []
        parts += [f"step {self.global_step}"] if self.global_step is not None else []
        if self.at_ms is not None:
            parts.append(f"{number(self.at_ms[0])} to {number(self.at_ms[1])} ms")
        return ", ".join(parts)


def ratio_interval(
    ms: float,
    half_width_ms: float,
    most_ms: float = math.inf,
    more_ms: float = 0.0,
    errors: tuple[float, float] = (MENDED_ERROR, MENDED_ERROR),
) -> tuple[float, float] | None:
    """Of what mending saves, by the interval over steps; None where that tells nothing. more_ms: what may go
    with it at most, which no error makes more."""
    half = half_width_ms / ms
    if half > math.log(WIDEST):
        return None
    low, high = (math.hypot(half, error) for error in errors)
    return ms * math.exp(-low), min(ms * math.exp(high) + more_ms, most_ms)
