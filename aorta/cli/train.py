"""aorta train and demo: runs of aorta's own training loop, with settings as KEY=VALUE."""

import os
import subprocess
import sys
from pathlib import Path

import click

from aorta.cli.options import output_option
from aorta.command_line import OneScreenCommand, module_environment, rare
from aorta.launcher import rank_text

MOST_LOCAL_RANKS = 1024

settings_argument = click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
config_option = click.option(
    "--config",
    default="default",
    metavar="NAME|FILE",
    help="default, ddp, fsdp, fsdp_tp, moe, tp, or a YAML file.",
)


# ---- train ---------------------------------------------------------------------------------------


@click.command(
    "train",
    cls=OneScreenCommand,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # torchrun's spelling
)
@settings_argument
@config_option
@click.option(
    "--nproc-per-node",
    "num_ranks",
    type=click.IntRange(1, MOST_LOCAL_RANKS),
    metavar="N",
    help="Start N ranks here, as torchrun does.",
)
@rare("--override", multiple=True, metavar="KEY=VALUE", help="The same as KEY=VALUE alone; may repeat.")
def train_command(
    config: str,
    override: tuple[str, ...],
    num_ranks: int | None,
    settings: tuple[str, ...],
) -> int:
    """Train a small decoder and record where its steps lose time.

    Settings follow as section.key=value: aorta train --config fsdp training.max_steps=50.
    Without --nproc-per-node this process is one rank: torchrun --nproc_per_node 4 -m aorta train.
    """
    arguments = ["--config", config]
    if override or settings:
        arguments += ["--override", *override, *settings]
    if num_ranks is not None or rank_text() is None:  # a launcher ends the others before the first rank spoke
        refuse_mistakes(num_ranks or 1, config, (*override, *settings))
    if num_ranks is not None:
        command = training_command(num_ranks, *arguments)
        os.execve(command[0], command, module_environment())
    from aorta.training.command import main

    return main(arguments, prog="aorta train")


def refuse_mistakes(num_ranks: int, config: str, overrides: tuple[str, ...]) -> None:
    """ConfigError for settings that each rank would refuse, before torch is imported or a rank started."""
    from aorta.config.layout import validate
    from aorta.config.load import load_config

    validate(load_config(config, overrides), num_ranks)


def training_command(num_ranks: int, *arguments: str) -> list[str]:
    """The command that trains with num_ranks processes on this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc_per_node", str(num_ranks), "-m", "aorta.training", *arguments]


# ---- demo ----------------------------------------------------------------------------------------


@click.command("demo", cls=OneScreenCommand)
@settings_argument
@config_option
@output_option(
    default=Path("artifacts/demo"),
    help="Folder of the run; default: artifacts/demo.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
def demo_command(config: str, output: Path, open_page: bool, settings: tuple[str, ...]) -> int:
    """Train two ranks and report where the time went: on two GPUs, or on the CPU if there are fewer.

    Settings follow as section.key=value: aorta demo training.max_steps=50. The report is in report/ of
    the run's folder.
    """
    from aorta.cli.report import write_and_print
    from aorta.cli.run import check_output
    from aorta.device.backend import accelerator

    refuse_mistakes(2, config, settings)
    check_output(output)
    environment = {"OMP_NUM_THREADS": "1"} | module_environment()  # torchrun's choice, without its warning
    num_gpus = accelerator().count()
    if num_gpus < 2:
        click.echo(f"{num_gpus} GPUs: two ranks on the CPU, over gloo", err=True)
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    overrides = ("--override", f"training.output_dir={output}", *settings)
    command = training_command(2, "--config", config, *overrides)
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        return status
    return write_and_print([output], ["demo"], output / "report", open_page=open_page)
