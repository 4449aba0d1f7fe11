"""The probe as a page of text."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from aorta.queues.probe.priority import Delays
from aorta.queues.probe.probe import ProbeResult, ProbeSetting, conclude
from aorta.queues.probe.switch import PLACEMENTS, Chains, Seen


def show_probe(result: ProbeResult, console: Console) -> None:
    conclusion = conclude(result.queues)
    number = (
        "unclear"
        if conclusion.queues is None
        else f"{'at least ' if conclusion.at_least else ''}{conclusion.queues}"
    )
    settings = [f"{name}={value}" for name, value in result.environment.items() if value is not None]
    console.print(
        f"{result.device}   {result.num_streams} streams   {' '.join(settings) or 'default settings'}"
    )
    console.print(f"\nhardware queues   {number}\n  {conclusion.because}", highlight=False)
    if result.queues is not None and result.queues.order is not None:
        meaning = {"start": "kernels start in order of submission", "barrier": "kernels run one by one"}
        console.print(f"  in a shared queue {meaning[result.queues.order]}", highlight=False)
    if result.chains is not None:
        console.print()
        console.print(_chains(result.chains))
        for line in _switch(result.chains):
            console.print(line, highlight=False)
    console.print()
    console.print(_delays(result))
    for line in _inversion(result):
        console.print(line, highlight=False)
    for part, reason in result.not_measured.items():
        console.print(f"{part}: not measured: {reason}", highlight=False)
    clock = result.clock
    console.print(
        f"\nclock {clock.source}: tick {clock.tick_ns:g} ns, read every {clock.read_ns:.0f} ns; "
        f"{clock.host_ratio:.4f} of the host's rate",
        highlight=False,
    )


def show_settings(variable: str, settings: Sequence[ProbeSetting], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name, justify in ((variable, "right"), ("queues", "right"), ("as set", "left"), ("because", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for setting in settings:
        number = "unclear" if setting.queues is None else f"{'≥' if setting.at_least else ''}{setting.queues}"
        as_set = "?" if setting.as_set is None else "yes" if setting.as_set else "NO"
        table.add_row(str(setting.value), number, as_set, setting.because)
    console.print(table)


def _chains(chains: Chains) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("chain of empty kernels")
    for name in ("µs per kernel", "95 %"):
        table.add_column(name, justify="right")
    placement = _placement_text(chains.seen)
    names = {
        "same": "one stream",
        "switching": f"{chains.streams} streams{placement} in turn, by events",
    }
    for leg in PLACEMENTS:
        slope = chains.slopes[leg]
        interval = f"{slope.interval_us[0]:.3f} … {slope.interval_us[1]:.3f}"
        table.add_row(names[leg], f"{slope.us:.3f}", interval)
    return table


def _placement_text(seen: Seen | None) -> str:
    """Queues that the streams were seen on; in how many runs, unless in all."""
    if seen is None:
        return ""
    runs = "" if seen.always else f" (seen in {seen.verified} of {seen.runs} runs)"
    return f" on different queues{runs}"


def _switch(chains: Chains) -> list[str]:
    low, high = chains.per_switch.interval_us
    lines = [f"switch to another stream   {chains.per_switch.us:+.3f} µs   {low:+.3f} … {high:+.3f}"]
    return lines if chains.primed else [*lines, "launch-bound: some chains began before they were submitted"]


def _delays(result: ProbeResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("start delay of small kernels")
    for name in ("mean µs", "p50 µs", "p99 µs", "largest µs", "kernels"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Delays | None]] = []
    if result.effect is not None:
        rows += [
            ("alone", result.effect.alone),
            ("beside floods, high priority", result.effect.high),
            ("beside floods, equal priority", result.effect.equal),
        ]
    for name, delays in rows:
        if delays is None:
            table.add_row(name, "–", "–", "–", "–", "–")
        else:
            figures = (delays.mean_us, delays.p50_us, delays.p99_us, delays.largest_us)
            table.add_row(name, *[f"{figure:.1f}" for figure in figures], str(delays.num))
    return table


def _inversion(result: ProbeResult) -> list[str]:
    lines = []
    for part, reason in (
        ("effect", result.effect and result.effect.reason),
        ("inversion", result.inversion and result.inversion.reason),
    ):
        if reason:
            lines.append(f"{part}: {reason}")
    inversion = result.inversion
    if inversion is not None and inversion.prioritized_us and inversion.equal_us and inversion.alone_us:
        verdict = "yes" if inversion.inverted else "no"
        lines.append(
            f"priority inversion   {verdict}: high waits for low beside medium floods "
            f"{_middle(inversion.prioritized_us):.0f} µs, with equal priorities "
            f"{_middle(inversion.equal_us):.0f} µs, without floods {_middle(inversion.alone_us):.0f} µs"
        )
    return lines


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
