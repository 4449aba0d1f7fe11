"""The probe as a page of text."""

from rich.console import Console
from rich.table import Table

from aorta.queues.probe.priority import Effect
from aorta.queues.probe.probe import ProbeResult, conclude
from aorta.queues.probe.switch import SwitchCost


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
    if result.switch is not None:
        console.print(f"\n{_switch(result.switch)}", highlight=False)
    if result.effect is not None:
        console.print()
        console.print(_delays(result.effect))
        if result.effect.reason:
            console.print(f"effect: {result.effect.reason}", highlight=False)
    for part, reason in result.not_measured.items():
        console.print(f"{part}: not measured: {reason}", highlight=False)
    clock = result.clock
    console.print(
        f"\nclock {clock.source}: tick {clock.tick_ns:g} ns, read every {clock.read_ns:.0f} ns; "
        f"{clock.host_ratio:.4f} of the host's rate",
        highlight=False,
    )


def _switch(switch: SwitchCost) -> str:
    if switch.per_switch_us is None or switch.interval_us is None:
        return f"switch to another stream   {switch.reason}"
    low, high = switch.interval_us
    return (
        f"switch to another stream   {switch.per_switch_us:+.3f} µs   {low:+.3f} … {high:+.3f}"
        f"   (an empty kernel takes {switch.same_stream_us:.3f} µs on one stream)"
    )


def _delays(effect: Effect) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("start delay of small kernels")
    for name in ("mean µs", "p50 µs", "p99 µs", "largest µs", "kernels"):
        table.add_column(name, justify="right")
    for name, delays in (
        ("alone", effect.alone),
        ("beside floods, high priority", effect.high),
        ("beside floods, equal priority", effect.equal),
    ):
        if delays is None:
            table.add_row(name, "–", "–", "–", "–", "–")
        else:
            figures = (delays.mean_us, delays.p50_us, delays.p99_us, delays.largest_us)
            table.add_row(name, *[f"{figure:.1f}" for figure in figures], str(delays.num))
    return table
