"""Times one layer of each kind on the devices present, for the projection's benchmark mode.

    python -m aorta.training.layer_times --model llama3-8b --seq-len 4096 --output layers.json
    torchrun --nproc_per_node 2 -m aorta.training.layer_times --tp 2 ... (or --ep 2 for a mixture)
    python -m aorta.projection performance --profiling-mode both --measurements layers.json ...

A block, the embedding, and the output layer with its loss run forward and backward in bf16, with the
collectives of tp or ep inside and nothing of data parallelism. Repeats follow each other without a
synchronisation, as in a step: a layer that the host cannot launch in time measures the host.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from aorta.config import Config, ModelConfig, ParallelConfig, TrainingConfig, validate
from aorta.config.structs import CompileConfig, DataConfig, DeviceChoice
from aorta.device.backend import backend_of
from aorta.device.marks import Mark
from aorta.errors import AortaError, ConfigError
from aorta.hardware import hardware_name_of
from aorta.launcher import is_first_rank, launched_rank
from aorta.projection.benchmarked import MeasuredUnit, Measurements, shape_of
from aorta.projection.model import Model, load_model
from aorta.training.model import Transformer
from aorta.training.parallel import make_meshes
from aorta.training.setup import build_model, choose_device, set_arithmetic, start_process_group

BF16 = torch.bfloat16


class LayerWork(NamedTuple):
    """One unit to time. forward() returns the tensors at which the backward pass begins."""

    name: str
    forward: Callable[[], tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    """Tensors whose gradients the layer before waits for."""
    parameters: tuple[nn.Parameter, ...]


class LayerTimes(NamedTuple):
    """Milliseconds of each repeat."""

    forward_ms: list[float]
    backward_ms: list[float]


def measure(config: Config, num_warmup: int, num_repeats: int) -> list[MeasuredUnit]:
    """Times of every unit on the slowest rank, the same list on every rank. Collective.

    Needs a process group, and a config that layer_config made.
    """
    layout = validate(config, dist.get_world_size())
    device = choose_device(config, launched_rank())
    form = build_model(config, layout, make_meshes(layout, device.type), device)
    model = form.plain.to(BF16)
    assert isinstance(model, Transformer)
    units = []
    for work in _units(model, config, device):
        times = time_unit(work, device, num_warmup, num_repeats)
        forward_ms, backward_ms = (_of_slowest_rank(values, device) for values in times)
        units.append(
            MeasuredUnit(
                unit=work.name,  # type: ignore[arg-type]  # one of the four by construction
                micro_batch_size=config.training.batch_size,
                seq_len=config.data.seq_len,
                forward_ms=_quantile(forward_ms, 0.5),
                backward_ms=_quantile(backward_ms, 0.5),
                forward_p90_ms=_quantile(forward_ms, 0.9),
                backward_p90_ms=_quantile(backward_ms, 0.9),
                num_repeats=num_repeats,
                tp=layout.tp,
                ep=layout.ep,
                recompute="full" if config.training.activation_checkpointing else "none",
                sequence_parallel=False,
                vocab_parallel=False,
            )
        )
    return units


def _units(model: Transformer, config: Config, device: torch.device) -> Iterator[LayerWork]:
    """The units of a model of one layer, in its order. Inputs stay the same tensors over all repeats."""
    shape = (config.training.batch_size, config.data.seq_len)
    token_BS = torch.randint(config.model.vocab_size, shape, device=device)
    x_BSD = torch.randn(*shape, config.model.hidden, device=device, dtype=BF16, requires_grad=True)
    block = model.blocks[0]

    def run_block() -> tuple[Tensor, ...]:
        y_BSD, aux_loss = block(x_BSD)
        return (y_BSD,) if aux_loss is None else (y_BSD, aux_loss)

    def run_output() -> tuple[Tensor, ...]:
        logit_BSV = model.output(model.norm(x_BSD))
        return (F.cross_entropy(logit_BSV.flatten(0, 1).float(), token_BS.flatten()),)

    name = "moe" if config.model.num_experts else "dense"
    yield LayerWork(
        "embedding", lambda: (model.embedding(token_BS),), (), tuple(model.embedding.parameters())
    )
    yield LayerWork(name, run_block, (x_BSD,), tuple(block.parameters()))
    ends = (*model.norm.parameters(), *model.output.parameters())
    yield LayerWork("output", run_output, (x_BSD,), ends)


def time_unit(work: LayerWork, device: torch.device, num_warmup: int, num_repeats: int) -> LayerTimes:
    """Times of a unit's forward and backward, repeated back to back.

    Gradients are new in each repeat, as in a step of one micro-batch.
    """
    devices = backend_of(device)
    clock = devices.clock(device)
    marks: list[tuple[Mark, Mark, Mark]] = []
    seeds: tuple[Tensor, ...] | None = None  # made once: a step's gradients come from the layer above
    for _ in range(num_warmup + num_repeats):
        for tensor in (*work.inputs, *work.parameters):
            tensor.grad = None
        start = clock.mark()
        roots = work.forward()
        middle = clock.mark()
        if seeds is None:
            seeds = tuple(torch.ones_like(root) for root in roots)
        torch.autograd.backward(roots, seeds)
        marks.append((start, middle, clock.mark()))
    # Only here: the device was to be busy with one repeat while the host launched the next.
    devices.synchronize(device)
    measured = marks[num_warmup:]
    return LayerTimes(
        [clock.distance_ms(start, middle) for start, middle, _ in measured],
        [clock.distance_ms(middle, end) for _, middle, end in measured],
    )


def _of_slowest_rank(values: list[float], device: torch.device) -> list[float]:
    """The largest value of all ranks, per repeat: a layer with a collective ends when its last rank does."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    slowest: list[float] = largest.tolist()
    return slowest


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def layer_config(
    model: Model,
    *,
    micro_batch_size: int,
    seq_len: int,
    tp: int = 1,
    ep: int = 1,
    recompute: bool = False,
    compiled: bool = False,
    device: str = "auto",
) -> Config:
    """Settings of aorta.training for one layer of a model of config/models.

    Raises ConfigError for what aorta's own model does not have.
    """
    if model.latent is not None:
        raise ConfigError(f"{model.name}: aorta's model has no latent attention to time")
    if model.qk_dim * model.num_heads != model.hidden:
        raise ConfigError(
            f"{model.name}: aorta's model has heads of hidden / num_heads = "
            f"{model.hidden // model.num_heads}, not {model.qk_dim}"
        )
    experts = model.experts
    if experts is not None and experts.num_shared:
        raise ConfigError(f"{model.name}: aorta's model has no shared experts to time")
    return Config(
        model=ModelConfig(
            hidden=model.hidden,
            ffn=experts.ffn if experts else model.ffn,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            num_layers=1,
            vocab_size=model.vocab_size,
            num_experts=experts.num_experts if experts else 0,
            num_active_experts=experts.num_active if experts else 1,
        ),
        training=TrainingConfig(
            batch_size=micro_batch_size,
            activation_checkpointing=recompute,
            device=device,  # type: ignore[arg-type]  # the command allows the three that there are
        ),
        data=DataConfig(seq_len=seq_len),
        # Replicas: no gather of weights is inside, and no step whose gradients they would reduce.
        parallel=ParallelConfig(mode="ddp", dp=ep, tp=tp, ep=ep),
        compile=CompileConfig(enabled=compiled),
    )


@contextmanager
def process_group(config: Config) -> Iterator[torch.device]:
    """Context with the launcher's ranks, or this process alone, as process group; yields the device."""
    ranks = launched_rank()
    if config.parallel.dp is not None and config.parallel.tp * config.parallel.dp != ranks.world_size:
        needed = config.parallel.tp * config.parallel.dp
        raise ConfigError(
            f"tp {config.parallel.tp} and ep {config.parallel.ep} need {needed} ranks, there are "
            f"{ranks.world_size}; start with torchrun --nproc_per_node {needed}"
        )
    validate(config, ranks.world_size)
    device = choose_device(config, ranks)
    set_arithmetic(config)
    start_process_group(config, ranks, device)
    yield device
    # Not after an error: NCCL would wait for collectives that other ranks may never join.
    dist.destroy_process_group()


def measurements(
    model: Model, config: Config, device: torch.device, gpu: str | None, units: list[MeasuredUnit]
) -> Measurements:
    """Content of the output file. gpu: name of its hardware file, where the device's name tells none."""
    name = backend_of(device).name(device)
    return Measurements(
        schema=1,
        gpu=gpu or hardware_name_of(name) or name,
        source=f"aorta.training.layer_times on {name}, torch {torch.__version__}",
        units=units,
        stack="compiled" if config.compile.enabled else "eager",
        model=shape_of(model),
    )


def write(path: Path, measured: Measurements) -> None:
    """Write one JSON file; raise ConfigError, and leave the file alone, where the path exists."""
    try:
        with path.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    except FileExistsError:
        raise ConfigError(f"--output {path} already exists; name another file") from None
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from None


def text(measured: Measurements, path: Path) -> str:
    """Table with a line per unit; the path is the last line."""
    lines = [
        f"{measured.source}   {measured.stack}",
        "",
        f"{'':12s}{'forward':>12s}{'p90':>10s}{'backward':>12s}{'p90':>10s}",
    ]
    lines += [
        f"{unit.unit:12s}{unit.forward_ms:9.3f} ms{unit.forward_p90_ms or math.nan:10.3f}"
        f"{unit.backward_ms:9.3f} ms{unit.backward_p90_ms or math.nan:10.3f}"
        for unit in measured.units
    ]
    return "\n".join([*lines, "", f"wrote {path}"])


@click.command(help=__doc__)
@click.option("--model", required=True, metavar="NAME|FILE", help="config/models, or a YAML file.")
@click.option("--micro-batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seq-len", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True)
@click.option("--ep", type=click.IntRange(1), default=1, show_default=True)
@click.option("--recompute", type=click.Choice(["none", "full"]), default="none", show_default=True)
@click.option("--compile", "compiled", is_flag=True, help="Blocks under torch.compile.")
@click.option("--warmup", type=click.IntRange(1), default=5, show_default=True)
@click.option("--repeats", type=click.IntRange(2), default=20, show_default=True)
@click.option("--device", type=click.Choice(get_args(DeviceChoice)), default="auto", show_default=True)
@click.option("--gpu-arch", metavar="NAME", help="Default: the hardware file that the device's name holds.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(**options: Any) -> None:
    is_first = is_first_rank()
    try:
        measured = _measured(**options)
        if is_first:
            write(options["output"], measured)
            click.echo(text(measured, options["output"]))
    except AortaError as error:
        if is_first:
            click.echo(f"error: {error}", err=True)
        sys.exit(2)


def _measured(**options: Any) -> Measurements:
    if options["output"].exists():
        raise ConfigError(f"--output {options['output']} already exists; name another file")
    model = load_model(options["model"])
    config = layer_config(
        model,
        micro_batch_size=options["micro_batch_size"],
        seq_len=options["seq_len"],
        tp=options["tp"],
        ep=options["ep"],
        recompute=options["recompute"] == "full",
        compiled=options["compiled"],
        device=options["device"],
    )
    with process_group(config) as device:
        units = measure(config, options["warmup"], options["repeats"])
        return measurements(model, config, device, options["gpu_arch"], units)


if __name__ == "__main__":
    main()
