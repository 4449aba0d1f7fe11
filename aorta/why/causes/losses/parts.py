"""What each rank spends a step on, apart from communication: cells of the account as causes see them.

A cause is what a step would be shorter by. What lies behind the body of a step on a CPU delays the next one
and counts there; an optimizer counts for what it takes beyond its memory traffic.
"""

from dataclasses import dataclass

import numpy as np

from aorta.account.judge.cells import EXPOSED_CELLS, HOST_PARTS, Account, Exposed, Host
from aorta.account.judge.stacks import FEWEST, MOST_RANKS, Samples, samples_of, samples_of_ranks
from aorta.account.load.rank.host import BYTES, IDLE, IDLE_BEHIND, LOOPS, OTHER
from aorta.account.load.rank.kernels import COUNT, TIME
from aorta.account.load.rank.phases import PREFIX
from aorta.account.metrics import THROTTLED, of_operation, operations
from aorta.account.model import Run
from aorta.account.rows import positive
from aorta.hardware.names import hardware_name_of
from aorta.hardware.part import Hardware, load_hardware
from aorta.timeline.arrays import Flags, Floats
from aorta.why.causes.program import program_of

WORK = ("compute", "hidden")
"""Cells of what a rank computes."""
HARMLESS = frozenset(("sw_power_cap", "applications_clocks_setting", "display_clock_setting", "sync_boost"))
"""Limits that a busy or a pinned device meets as a matter of course."""
OPTIMIZER_PASSES = 7
"""Adam reads the gradient, and reads and writes the parameter and two moments."""
FUSED_SAVES = 0.5
"""Of Adam, AdamW on a CPU: 7 of 20 passes stay. Measured: 0.36 (16 MB, four cores) to 0.8 (38 MB, two)."""
OF_ITS_MEMORY = 0.6
"""Of the bandwidth of a device, that a fused optimizer reaches: 0.6 to 0.9 in nine programs on H200."""
CPU_BYTES_PER_S = 4e9
"""What a core moves in an optimizer that is bound by memory: slower is bound by something else."""
BUSY_CPU_BYTES_PER_S = 1.25e9
"""The same where it is not known how long the thread had a core."""
KERNEL_GAP_MS = 0.002
"""Between two kernels of a stream that has work queued."""
EAGER_LAUNCH_MS = 0.01
"""What an operation of eager PyTorch takes the host to launch: 8 to 10 us a kernel in planted loops."""
LOW_CLOCK = 0.85
"""Of the usual clock: below it a rank is slowed down, whatever the driver says of the reason."""
SLIGHTLY_LOW_CLOCK = 0.97
MIN_USUAL_STEPS = 3
"""At the usual clock, that others are compared with."""


def work_ms_of(account: Account) -> Floats:
    """[step]: what ranks compute, a mean over them; zero where steps without details alone are judged."""
    cells = [account.cells[name] for name in WORK if name in account.cells]
    if not cells:
        return np.zeros_like(account.step_ms[0])
    mean: Floats = np.sum(cells, axis=0).mean(axis=0)
    return mean


def part_of_device(judged: Run) -> Hardware | None:
    """Of the first device."""
    rows = judged.noted.devices
    name = hardware_name_of(str(rows[0].get("name"))) if rows else None
    return None if name is None else load_hardware(name)


def beside_others(account: Account, work_ms: Floats) -> tuple[Floats, dict[tuple[str, ...], float]]:
    """[step]: work on a CPU, and what others take of its cores, which goes with it; the part of each."""
    both_ms = work_ms + account.cells.get("core_taken", np.zeros_like(account.step_ms)).mean(axis=0)
    of_work = float(work_ms.mean() / max(both_ms.mean(), 1e-9))
    return both_ms, {WORK: of_work, ("core_taken",): 1 - of_work}


@dataclass(slots=True)
class Parts:
    """[rank, step] in ms; what delays a step counts in it, wherever it was."""

    account: Account
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
    is_unfused: bool
    """On a CPU, where fused=True would be faster."""
    cpu_ms: Floats | None
    """Of the thread that trains; None where records do not tell."""
    small_kernels_ms: float | None
    """By how much launching the kernels of a step may take longer than the device needs for them: of classes
    whose kernels are shorter than a launch. None where nobody counted kernels."""
    loops_ms: float
    """Of a step, what the host spends in loops that wait for the device for each of many values."""
    behind_update: float
    """Part of the idle time in `launch` that comes behind the optimizer, from the loop's own code."""
    idle_waits_ms: Floats
    """In `launch`: waiting for ranks in which the host has not launched what comes next."""
    data_waits_ms: Floats
    """In `data`: waiting for ranks in which the host loads as long as theirs."""
    asleep_ms: Floats
    """On a device, what the host's thread sleeps, also while the device is busy or waits."""
    taken_ms: Floats | None
    """What other threads and programs took of its cores: it was ready to run. None as of cpu_ms."""

    @property
    def on_device(self) -> bool:
        return self.account.on_device

    @property
    def knows_host(self) -> bool:
        """Records tell what the host did; GPU traces without host calls and old records do not."""
        return self.account.knows_host


def parts_of(run: Run, account: Account, small_launch_ms: float = 0.0) -> Parts:
    """run: of the steps of the account. small_launch_ms: what the host needs in a step to launch small
    collectives."""
    cells = account.cells
    host = Host(run, run.judged_steps)
    zero = np.zeros_like(account.step_ms)
    is_unfused = not account.on_device and "unfused" in program_of(run.noted)[0]
    exposed = account.exposed
    data_waits = zero
    idle_waits = zero if exposed is None or not account.on_device else exposed.idle_waits_ms
    ms_by_kind = {kind: cells[kind] for kind in (*HOST_PARTS, "optimizer", "copy") if kind in cells}
    ms_by_kind["between_steps"] = account.between_ms
    if account.on_device:
        compute = work = positive(host.metric("compute_ms"))
        # What the device computes between all steps it was given in them; an evaluation is in some.
        unusual = positive(account.between_ms - np.median(account.between_ms, axis=1, keepdims=True))
        idle = sum(
            (cells[name] for name in ("between_steps", "idle", "launch") if name in cells), start=unusual
        )
        ms_by_kind["between_steps"] = np.minimum(account.between_ms, idle)
        launch = cells.get("launch", zero)
        ms_by_kind["small_messages"] = np.minimum(small_launch_ms, launch)
        gaps = 0.0 if host.num_kernels is None else KERNEL_GAP_MS * host.num_kernels
        ms_by_kind["launch"] = positive(launch - ms_by_kind["small_messages"] - gaps) + idle_waits
        if account.knows_host:  # what it writes is copied from the device meanwhile
            saving = host.span("checkpoint") + host.tail("checkpoint")
            idle, copy = cells.get("checkpoint", zero), cells.get("copy", zero)
            ms_by_kind["checkpoint"] = np.minimum(np.maximum(saving, idle), idle + copy)
        ms_by_kind["synchronisation"] = cells.get("synchronisation", zero)
        ms_by_kind["idle"] = cells.get("idle", zero)
        ms_by_kind["optimizer"] = cells.get("optimizer", zero) + _beyond_a_pass(run, host, zero)
        if exposed is not None and exposed.is_split and len(run.ranks) > 1 and "data" in cells:
            data_waits = _waits_that_load(host, cells["data"], exposed)
            ms_by_kind["data"] = cells["data"] + data_waits
    else:
        for kind, tail in account.tails.items():
            ms_by_kind[kind] = cells[kind] - tail + delayed(tail)
        optimizer = ms_by_kind.get("optimizer", zero)
        bytes_of_optimizer = host.part(BYTES)
        size = np.full_like(zero, np.nan) if bytes_of_optimizer is None else bytes_of_optimizer
        rate, on_core = BUSY_CPU_BYTES_PER_S, np.ones_like(zero)
        if host.use is not None:
            rate, (cpu, taken) = CPU_BYTES_PER_S, host.use
            on_core = np.divide(cpu, cpu + taken, out=on_core, where=cpu + taken > 0)
        own = optimizer * on_core  # where others have its core meanwhile, that is their time
        ms_by_kind["optimizer"] = positive(own - OPTIMIZER_PASSES * size / rate * 1e3)
        if is_unfused:
            ms_by_kind["optimizer"] = np.maximum(ms_by_kind["optimizer"], FUSED_SAVES * own)
        work = cells.get("compute", zero) + cells.get("hidden", zero) + cells.get("blocked", zero)
        compute = work + cells.get("core_taken", zero) + positive(optimizer - ms_by_kind["optimizer"])
    asleep, ms_by_kind["core_taken"] = _own_threads(run, account, host)
    locked_out = np.minimum(_locked_out(run), account.step_ms)
    ms_by_kind["asleep"], ms_by_kind["locked_out"] = positive(asleep - locked_out), locked_out
    clock, usual, loss = _clocks(run, compute)
    # On a CPU the account's steps are shortened to the usual one.
    part = (
        1.0 if account.on_device else float(account.step_ms.mean() / positive(host.metric("step_ms")).mean())
    )
    behind, other = (run.mean_of_host(name) for name in (IDLE_BEHIND, f"{IDLE}{OTHER}"))
    return Parts(
        account=account,
        step_ms=account.step_ms,
        ms_by_kind=ms_by_kind,
        compute_ms=compute,
        clock_loss_ms=loss,
        clock_mhz=clock,
        usual_clock_mhz=usual,
        work_ms=work,
        is_unfused=is_unfused,
        small_kernels_ms=_small_kernels(run) if account.on_device else None,
        loops_ms=run.mean_of_host(LOOPS) or 0.0,
        behind_update=min(behind / other, 1.0) if behind and other else 0.0,
        idle_waits_ms=idle_waits,
        data_waits_ms=data_waits,
        asleep_ms=host.asleep(account.between_ms) if account.on_device else zero,
        cpu_ms=None if host.use is None else part * host.use[0],
        taken_ms=None if host.use is None else part * host.use[1],
    )


def _beyond_a_pass(run: Run, host: Host, zero: Floats) -> Floats:
    """[rank, step]: what kernels of an optimizer that is not fused take longer than its memory traffic. Of
    one whose kernels are none of torch's nobody knows which they are."""
    size, part, metric = host.part(BYTES), part_of_device(run), of_operation(TIME, "optimizer")
    if size is None or part is None or metric not in run.metrics or "foreach" not in program_of(run.noted)[0]:
        return zero
    pass_s = OPTIMIZER_PASSES * size / (OF_ITS_MEMORY * part.memory.hbm_bytes_per_s)
    return positive(run.values(metric) - 1e3 * pass_s)


def _waits_that_load(host: Host, idle_ms: Floats, exposed: Exposed) -> Floats:
    """[rank, step]: what devices wait for the rank that loads longest while their own hosts load as long.
    They came ahead once; if that rank loaded in no time, they would have to wait for their hosts.

    idle_ms: of the devices, for loading.
    """
    loads = host.part(f"{PREFIX}data")  # as hosts go through their steps, ahead of the devices' maybe
    hosts_ms = (host.span("data") + host.tail("data") if loads is None else positive(loads)).mean(axis=1)
    longest = longest_of(idle_ms)
    shared_ms = positive(np.minimum(hosts_ms, idle_ms[longest].mean() - hosts_ms[longest] + hosts_ms))
    waits = np.minimum(positive(shared_ms[:, None] - idle_ms), exposed.wait_ms)
    waits[longest] = 0.0
    return waits


def longest_of(by_rank_ms: Floats) -> int:
    """The row of the rank that spends most."""
    return int(np.argmax(by_rank_ms.mean(axis=1)))


def _small_kernels(judged: Run) -> float | None:
    found = None
    for name in operations(judged.metrics, COUNT):
        time_ms, num = (judged.mean_of(of_operation(metric, name)) for metric in (TIME, COUNT))
        if name != "communication" and time_ms is not None and num is not None:
            found = (found or 0.0) + max(num * EAGER_LAUNCH_MS - time_ms, 0.0)
    return found


def _own_threads(judged: Run, account: Account, host: Host) -> tuple[Floats, Floats]:
    """What the thread sleeps, and what others take of its cores. A thread that sleeps within an operator of
    torch on a CPU waits for torch's other threads. Where others take its cores they take those of these
    threads too, and as much of them; the rest of that sleep is work, done by several."""
    zero = np.zeros_like(account.step_ms)
    blocked, taken = (account.cells.get(name, zero) for name in ("blocked", "core_taken"))
    samples = samples_of_ranks(judged)
    if account.on_device or host.use is None or not samples or not blocked.any():
        return blocked, taken
    within_ms = np.mean([one.ms[_sleeps_in_torch(one)].sum() for one in samples])
    # In a backward pass the thread also sleeps until gradients are reduced, which is exposed time.
    within_ms -= account.mean_ms(*EXPOSED_CELLS)
    part = min(max(float(within_ms) / float(blocked.mean()), 0.0), 1.0)
    cpu, ready = host.use
    ratio = np.divide(ready, cpu + ready, out=np.zeros_like(zero), where=cpu + ready > 0)
    return (1 - part) * blocked, taken + part * ratio * blocked


def _locked_out(judged: Run) -> Floats:
    """[rank, 1]: how long the thread waits for the interpreter's lock in the mean step, as FEWEST samples or
    more tell: one of a short run stands for as much as a tenth of it."""
    whole = judged.whole
    ms = np.zeros((len(judged.ranks), 1))
    for row, rank in enumerate(judged.ranks[:MOST_RANKS]):
        if (one := samples_of(whole, rank)) is not None:
            of_it = one.ms[one.is_judged & one.that("locked_out")]
            ms[row] = of_it.sum() if len(of_it) >= FEWEST else 0.0
    return ms


def _sleeps_in_torch(samples: Samples) -> Flags:
    within = samples.in_phase("forward", "backward", "optimizer") & samples.leaf_in("torch")
    return samples.is_judged & samples.that("sleeps") & within


def delayed(values: Floats) -> Floats:
    """[rank, step]: what lies behind the body of a step delays the next one."""
    moved = np.roll(values, 1, axis=1)
    moved[:, 0] = 0.0
    return moved


def _clocks(run: Run, compute: Floats) -> tuple[Floats, float | None, Floats]:
    """Clock, the usual one of the run's ranks, and what a lower one costs where it is held down. Limits that
    a busy device meets as a matter of course, such as its power, cost a rank what it meets them more than the
    rank that does so least: what the work needs is nothing to mend."""
    if "sm_clock_mhz" not in run.metrics:
        return np.full(compute.shape, np.nan), None, np.zeros_like(compute)
    clock = run.values("sm_clock_mhz")
    finite = clock[np.isfinite(clock)]
    if not len(finite):
        return clock, None, np.zeros_like(compute)
    usual = float(np.percentile(finite, 90))
    severe, usual_limit = np.zeros(compute.shape, dtype=bool), np.zeros(compute.shape, dtype=bool)
    for name in operations(run.metrics, THROTTLED):
        limit = usual_limit if name in HARMLESS else severe
        limit |= np.nan_to_num(run.values(of_operation(THROTTLED, name))) > 0
    if severe.any():
        free = clock[~severe & np.isfinite(clock)]
        if len(free):
            usual = max(usual, float(np.median(free)))
    ratio = np.nan_to_num(clock / usual, nan=1.0)
    is_held_down = (ratio < LOW_CLOCK) | (severe & (ratio < SLIGHTLY_LOW_CLOCK))
    loss = np.where(is_held_down, compute * (1 - ratio), 0.0) * _as_slow(compute, is_held_down, ratio)
    means = loss.mean(axis=1, keepdims=True)
    beyond = np.divide(means - means.min(), means, out=np.zeros_like(means), where=means > 0)
    return clock, usual, np.where(usual_limit & ~severe, loss * beyond, loss)


def _as_slow(compute: Floats, is_held_down: Flags, ratio: Floats) -> Floats:
    """[rank, 1]: of what a low clock would cost in proportion, the part by which the rank computes longer in
    such steps than in its others, or else than the other ranks at their usual clock: a sample may be of
    another moment, and work that waits for memory is no slower. 1 where nothing can be compared with."""
    part = np.ones((len(compute), 1))
    for row, held in enumerate(is_held_down):
        others = compute[row, ~held] if (~held).sum() >= MIN_USUAL_STEPS else compute[~is_held_down]
        expected = float((compute[row, held] * (1 - ratio[row, held])).sum()) / max(held.sum(), 1)
        if expected > 0 and len(others) >= MIN_USUAL_STEPS:
            part[row] = np.clip((compute[row, held].mean() - np.median(others)) / expected, 0.0, 1.0)
    return part
