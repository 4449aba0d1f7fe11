"""What each rank spends a step on, apart from communication: host parts, idle device, compute.

On a CPU the host is the device, and its parts are read off directly. On a GPU a part of the host costs what
the device idles meanwhile; a wait of the host for the device costs the idle time behind it, but no more than
the wait itself, since the host would have been ahead by that much. The host launches at most as long as its
threads work: the device idles the rest while they sleep.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aorta.account.judge.leading import metric_of
from aorta.account.judge.ranks import HARMLESS
from aorta.account.load.rank.host import AFTER, BYTES, CPU, IDLE, PREFIX, READY
from aorta.account.metrics import THROTTLED
from aorta.account.model import JudgedRun, Lead
from aorta.why.causes.finding import Floats, positive

HOST_PARTS = ("garbage_collection", "checkpoint", "data", "pause")
OPTIMIZER_PASSES = 7
"""Adam reads the gradient, and reads and writes the parameter and two moments."""
CPU_BYTES_PER_S = 4e9
"""What a core moves in an optimizer that is bound by memory: slower is bound by something else."""
BUSY_CPU_BYTES_PER_S = 1.25e9
"""The same where it is not known how long the thread had a core."""
KERNEL_GAP_MS = 0.002
"""Between two kernels of a stream that has work queued."""
LOW_CLOCK = 0.85
"""Of the usual clock: below it a rank is slowed down, whatever the driver says of the reason."""
SLIGHTLY_LOW_CLOCK = 0.97


@dataclass(slots=True)
class Parts:
    """[rank, step] in ms; what delays a step counts in it, wherever it was."""

    on_device: bool
    knows_host: bool
    """Records tell what the host did; traces and old records do not."""
    step_ms: Floats
    ms_by_kind: dict[str, Floats]
    """By kind: what the part costs its rank."""
    compute_ms: Floats
    """Without the parts in `ms_by_kind`."""
    clock_loss_ms: Floats
    """Part of compute_ms that a clock below the usual one costs."""
    clock_mhz: Floats
    usual_clock_mhz: float | None
    work_ms: Floats
    """compute_ms without the optimizer and, on a CPU, without what other threads took."""
    optimizer_ms: Floats
    """Optimizer.step on the host, all of it."""
    cpu_ms: Floats | None
    """Of the thread that trains; None where records do not tell."""
    taken_ms: Floats | None
    """What other threads and programs took of its cores: it was ready to run. None as of cpu_ms."""


def parts_of(judged: JudgedRun, lead: Lead, small_launch_ms: float = 0.0) -> Parts:
    """small_launch_ms: what the host needs in a step to launch small collectives."""
    run, first = judged.run, judged.num_warmup
    shape = run.metrics["step_ms"].shape
    on_device = run.source != "host"

    def host(name: str) -> Floats:
        return positive(run.host_parts.get(f"{PREFIX}{name}", np.zeros(shape)))

    def metric(name: str) -> Floats:
        return run.metrics.get(name, np.full(shape, np.nan))

    tails = {kind: host(f"{kind}{AFTER}") for kind in (*HOST_PARTS, "optimizer")}
    use = _thread_use(run.host_parts)
    between = positive(metric("between_steps_ms") - sum(tails.values()))
    compute = positive(metric(metric_of(lead, "compute_ms")))
    ms_by_kind: dict[str, Floats]
    work = compute
    if on_device:
        # The window of a step has what lies behind its body: the device idles in it meanwhile.
        spans = {kind: host(kind) + tails[kind] for kind in tails}
        spans["synchronisation"] = host("synchronisation") + _delayed(host(f"synchronisation{AFTER}"))
        idle = _idle(judged, lead)
        ms_by_kind = _on_device(judged, idle, spans, between, small_launch_ms)
        if use is not None:
            launching = use.cpu_ms + use.taken_ms + host("backward")  # launched by a thread of autograd
            is_noted = np.isfinite(run.host_parts[CPU])
            asleep = np.where(is_noted, positive(ms_by_kind["launch"] - launching), 0.0)
            ms_by_kind |= {"launch": ms_by_kind["launch"] - asleep, "asleep": asleep}
    else:
        spans = {kind: host(kind) + _delayed(tails[kind]) for kind in tails}
        ms_by_kind = {kind: spans[kind] for kind in HOST_PARTS}
        size = run.host_parts.get(BYTES, np.full(shape, np.nan))
        rate = BUSY_CPU_BYTES_PER_S if use is None else CPU_BYTES_PER_S
        ideal = OPTIMIZER_PASSES * size / rate * 1e3
        ms_by_kind["optimizer"] = positive(spans["optimizer"] - ideal * (1.0 if use is None else use.stretch))
        ms_by_kind["between_steps"] = _delayed(between)
        compute = positive(compute - sum(host(kind) for kind in HOST_PARTS) - ms_by_kind["optimizer"])
        optimizer = positive(host("optimizer") - ms_by_kind["optimizer"])
        work = positive(compute - optimizer - (0.0 if use is None else use.taken_ms))
    clock, usual, loss = _clocks(judged, compute)
    return Parts(
        on_device=on_device,
        knows_host=bool(run.host_parts),
        step_ms=run.metrics["step_ms"][:, first:],
        ms_by_kind={kind: values[:, first:] for kind, values in ms_by_kind.items()},
        compute_ms=compute[:, first:],
        clock_loss_ms=loss[:, first:],
        clock_mhz=clock[:, first:],
        usual_clock_mhz=usual,
        work_ms=work[:, first:],
        optimizer_ms=host("optimizer")[:, first:],
        cpu_ms=None if use is None else use.cpu_ms[:, first:],
        taken_ms=None if use is None else use.taken_ms[:, first:],
    )


@dataclass(frozen=True, slots=True)
class _ThreadUse:
    """What the thread that trains had of its cores, 0 in steps that do not tell."""

    cpu_ms: Floats
    taken_ms: Floats

    @property
    def stretch(self) -> Floats:
        """Times that work takes longer because others take turns on the core."""
        cpu = self.cpu_ms
        return np.divide(cpu + self.taken_ms, cpu, out=np.ones_like(cpu), where=cpu > 0)


def _thread_use(host_parts: Mapping[str, Floats]) -> _ThreadUse | None:
    """None where more than half of the steps lack either."""
    columns = [host_parts.get(name) for name in (CPU, READY)]
    present = [
        positive(values) for values in columns if values is not None and np.isnan(values).mean() <= 0.5
    ]
    return _ThreadUse(*present) if len(present) == len(columns) else None


def _delayed(values: Floats) -> Floats:
    """What lies behind the body of a step delays the next one."""
    moved = np.roll(values, 1, axis=1)
    moved[:, 0] = 0.0
    return moved


def _idle(judged: JudgedRun, lead: Lead) -> Floats:
    run = judged.run
    shape = run.metrics["step_ms"].shape
    idle = positive(run.metrics.get(metric_of(lead, "idle_ms"), np.zeros(shape)))
    if run.source == "events" and lead == "raw":
        bound = positive(run.metrics.get("starved_bound_ms", np.zeros(shape)))
        idle = idle + np.where(run.host_bound == 1, bound, 0.0)
    return idle


def _on_device(
    judged: JudgedRun, idle: Floats, spans: dict[str, Floats], between: Floats, small_launch_ms: float
) -> dict[str, Floats]:
    run = judged.run
    ms_by_kind: dict[str, Floats] = {}
    left = idle.copy()
    unusual = positive(idle - np.median(idle, axis=1, keepdims=True))
    for kind in (*HOST_PARTS, "optimizer"):
        idle_in_span = run.host_parts.get(f"{IDLE}{kind}")
        ms_by_kind[kind] = np.minimum(_idle_meanwhile(idle_in_span, spans[kind], unusual), left)
        left = left - ms_by_kind[kind]
    ms_by_kind["between_steps"] = between  # evaluation keeps the device busy, and no step comes on meanwhile
    left = positive(left - between)
    ms_by_kind["synchronisation"] = np.minimum(spans["synchronisation"], left)
    left = left - ms_by_kind["synchronisation"]
    ms_by_kind["small_messages"] = np.minimum(small_launch_ms, left)
    left = left - ms_by_kind["small_messages"]
    counts = [values for name, values in run.metrics.items() if name.startswith("kernel_count.")]
    gaps = KERNEL_GAP_MS * positive(np.sum(counts, axis=0)) if counts else 0.0
    ms_by_kind["launch"] = positive(left - gaps)
    return ms_by_kind


def _idle_meanwhile(idle: Floats | None, span: Floats, unusual: Floats) -> Floats:
    """Idle device while the host was in spans. Where a step's segments were not kept: as much of the span as
    in the steps that have both, and at least what the device idles longer than usual; all of it where no
    step has both."""
    if idle is None:
        return span
    is_measured = np.isfinite(idle) & (span > 0)
    ratio = float(idle[is_measured].sum() / span[is_measured].sum()) if is_measured.any() else 1.0
    estimate = np.maximum(min(ratio, 1.0) * span, np.minimum(span, unusual))
    return np.where(np.isnan(idle), estimate, idle)


def _clocks(judged: JudgedRun, compute: Floats) -> tuple[Floats, float | None, Floats]:
    """Clock, the usual one of the run's ranks, and what a lower one costs where it is held down."""
    run = judged.run
    clock = run.metrics.get("sm_clock_mhz", np.full(compute.shape, np.nan))
    finite = clock[:, judged.num_warmup :]
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return clock, None, np.zeros_like(compute)
    usual = float(np.percentile(finite, 90))
    severe = np.zeros(compute.shape, dtype=bool)
    for name, values in run.metrics.items():
        if name.startswith(f"{THROTTLED}.") and name.partition(".")[2] not in HARMLESS:
            severe |= np.nan_to_num(values) > 0
    if severe.any():
        free = clock[~severe & np.isfinite(clock)]
        if len(free):
            usual = max(usual, float(np.median(free)))
    ratio = np.nan_to_num(clock / usual, nan=1.0)
    is_held_down = (ratio < LOW_CLOCK) | (severe & (ratio < SLIGHTLY_LOW_CLOCK))
    return clock, usual, np.where(is_held_down, compute * (1 - ratio), 0.0)
