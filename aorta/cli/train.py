"""aorta train: the training loop, as one rank of a launcher or with ranks of its own."""

import os
import sys

import click

from aorta.command_line import module_environment


@click.command("train")
@click.option(
    "--config",
    default="default",
    show_default=True,
    metavar="NAME|FILE",
    help="YAML file, or default, ddp, fsdp, fsdp_tp, moe, tp.",
)
@click.option("--override", multiple=True, metavar="A.B=C", help="A setting on top of the file; may repeat.")
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    "num_ranks",
    type=click.IntRange(1),
    help="Start that many ranks here (torchrun --standalone); default: this process is a rank.",
)
@click.option("--enable-rocm-metrics", is_flag=True, help="Add rocm-smi's readings to the step records.")
@click.argument("settings", nargs=-1, metavar="[A.B=C]...")
def train_command(
    config: str,
    override: tuple[str, ...],
    num_ranks: int | None,
    enable_rocm_metrics: bool,
    settings: tuple[str, ...],
) -> int:
    """Train a small decoder and record where its steps lose time.

    Settings follow as section.key=value: aorta train --config fsdp training.max_steps=50.
    Under torchrun: torchrun --nproc_per_node 4 -m aorta train --config fsdp.
    """
    arguments = ["--config", config]
    if override or settings:
        arguments += ["--override", *override, *settings]
    if enable_rocm_metrics:
        arguments.append("--enable-rocm-metrics")
    if num_ranks is not None:
        command = training_command(num_ranks, *arguments)
        os.execve(command[0], command, module_environment())
    from aorta.training.command import main

    return main(arguments, prog="aorta train")


def training_command(num_ranks: int, *arguments: str) -> list[str]:
    """The command that trains with num_ranks processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(num_ranks), "-m", "aorta.training", *arguments]
