"""profile: a workload under the best profiler that is installed."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import click

from aorta.errors import ConfigError, RecordError
from aorta.launcher import rank_text
from aorta.queues.cli.options import stream_count
from aorta.queues.cli.run import run_command

Profiler = Literal["rocprofv3", "nsys", "torch"]
PROFILERS: tuple[Profiler, ...] = ("rocprofv3", "nsys", "torch")


def installed(hip: bool, has_gpu: bool) -> Profiler:
    """rocprofv3 on ROCm, nsys on CUDA; torch.profiler if neither is installed or there is no GPU."""
    if has_gpu and hip and shutil.which("rocprofv3"):
        return "rocprofv3"
    if has_gpu and not hip and shutil.which("nsys"):
        return "nsys"
    return "torch"


def command_line(profiler: Profiler, folder: Path, stem: str, run: list[str]) -> list[str]:
    """Command that starts the run under the profiler, and leaves a trace that aorta.traces reads."""
    if profiler == "rocprofv3":
        return [
            "rocprofv3", "--kernel-trace", "--memory-copy-trace", "--rccl-trace", "--marker-trace",
            "--output-format", "json", "-d", str(folder), "-o", stem, "--", *run,
        ]  # fmt: skip
    if profiler == "nsys":
        return [
            "nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite",
            "--force-overwrite=true", "-o", str(folder / stem), *run,
        ]  # fmt: skip
    return [*run, "--profile", "--profile-dir", str(folder)]


@click.command("profile", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("workload")
@click.option("--streams", "-s", default="8")
@click.option("--profiler", type=click.Choice(PROFILERS), help="Default: whichever is installed.")
@click.option("--profile-dir", type=click.Path(path_type=Path), default=Path("profiles"))
@click.option("--iterations", "-i", type=int, default=10)
@click.option("--overwrite", is_flag=True, help="Replace traces that are there.")
@click.pass_context
def profile_command(
    context: click.Context,
    workload: str,
    streams: str,
    profiler: Profiler | None,
    profile_dir: Path,
    iterations: int,
    overwrite: bool,
) -> None:
    """Run WORKLOAD in a process of its own under a profiler. Options of `run` may follow."""
    from aorta.device.backend import accelerator
    from aorta.queues.harness.measure import check_folder
    from aorta.queues.workloads import find

    kind, count = find(workload), stream_count(streams)
    if not kind.min_streams <= count <= kind.max_streams:
        raise ConfigError(f"{kind.name} uses {kind.min_streams} to {kind.max_streams} streams, not {count}")
    chosen = profiler or installed(accelerator().kind == "hip", accelerator().is_available())
    if chosen != "torch" and shutil.which(chosen) is None:
        raise ConfigError(f"--profiler {chosen} is not on PATH")
    stem = f"{kind.name}_streams{count}"
    rank = rank_text()
    stem = stem if rank is None else f"{stem}_rank{rank}"
    old = sorted(profile_dir.glob(f"{stem}*")) if profile_dir.is_dir() else []
    if old and not overwrite:
        raise RecordError(f"{old[0]} already exists; give another --profile-dir or --overwrite")
    check_folder(profile_dir, stem, overwrite)
    try:
        profile_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"--profile-dir {profile_dir} cannot be written: {error.strerror}") from None
    options = [
        kind.name,
        "--streams",
        str(count),
        "--iterations",
        str(iterations),
        "--no-switch",
        *context.args,
    ]
    run_command.make_context("run", list(options))  # refuses what `run` would, before a profiler starts
    run = [sys.executable, "-m", "aorta.hw_queue_eval", "run", *options]
    run += ["--overwrite"] if overwrite else []
    click.echo(f"profiling with {chosen}", err=True)
    status = subprocess.run(command_line(chosen, profile_dir, stem, run), check=False).returncode
    traces = sorted(profile_dir.glob(f"{stem}*"))
    for path in traces:
        click.echo(f"wrote {path}", err="--json" in context.args)
    if status == 0 and not traces:
        raise RecordError(f"{chosen} wrote no trace into {profile_dir}: it saw no kernel, or could not write")
    sys.exit(status)
