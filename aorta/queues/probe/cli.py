"""python -m aorta.queues probe."""

from typing import TYPE_CHECKING

import click
import msgspec

from aorta.queues.catalogue import PROBE_PARTS as PARTS

if TYPE_CHECKING:
    import torch


@click.command("probe")
@click.option("--device", "device_name", help="GPU to probe; default: the first.")
@click.option("--streams", default=64, help="Streams to try.")
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(PARTS), help="Measure this alone; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe_command(device_name: str | None, streams: int, parts: tuple[str, ...], as_json: bool) -> None:
    """Count hardware queues; measure what a switch costs and what priorities do."""
    from aorta.queues.probe.machine import check_streams
    from aorta.queues.probe.probe import probe

    check_streams(streams)
    result = probe(_device(device_name), streams, parts or PARTS)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    from aorta.queues.probe.show import show_probe

    show_probe(result, Console())


def _device(name: str | None) -> "torch.device":
    """The GPU of that name, as torch counts them, by default the first; ProbeError where there is none."""
    import torch

    from aorta.device.backend import accelerator
    from aorta.queues.probe.machine import ProbeError

    gpus = accelerator()
    first = str(gpus.device(0))
    try:
        device = torch.device(name or first)
    except RuntimeError as error:
        raise ProbeError(f"--device {name!r} is no device: try {first}") from error
    num = gpus.count()
    if device.type != gpus.torch_type or num == 0:
        raise ProbeError(f"probe needs a GPU, got --device {device} and torch sees {num} GPUs")
    if (device.index or 0) >= num:
        raise ProbeError(f"--device {device} is not there: torch sees {num} GPUs")
    return device
