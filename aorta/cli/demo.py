"""aorta demo: two ranks trained on what is here, and their report."""

import subprocess
from pathlib import Path

import click

from aorta.cli.train import training_command
from aorta.command_line import module_environment


@click.command("demo")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("artifacts/demo"),
    show_default=True,
    help="Folder of the run; the report goes to report/ in it.",
)
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
@click.argument("settings", nargs=-1, metavar="[A.B=C]...")
def demo_command(output: Path, open_page: bool, settings: tuple[str, ...]) -> int:
    """Train two ranks on two GPUs, or on the CPU where there are fewer, and report where the time went.

    Settings of the training loop may follow: aorta demo training.max_steps=50
    """
    import torch

    from aorta.cli.report import open_in_browser, write_and_print

    environment = {"OMP_NUM_THREADS": "1"} | module_environment()  # torchrun's choice, without its warning
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        click.echo(f"{num_gpus} GPUs: two ranks on the CPU, over gloo", err=True)
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = training_command(2, "--override", f"training.output_dir={output}", *settings)
    status = subprocess.run(command, env=environment, check=False).returncode
    if status != 0:
        return status
    result = write_and_print([output], ["demo"], output / "report")
    if open_page:
        open_in_browser(output / "report")
    return result
