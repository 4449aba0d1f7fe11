"""aorta run: start a command and record its training processes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from aorta.cli.options import NumberRange, output_option
from aorta.command_line import OneScreenCommand, discard_output, rare
from aorta.errors import ConfigError
from aorta.launcher import is_first_launch

AMD_DRIVER = "/dev/kfd"
"""Device of AMD's driver: only where it is can HIP run."""
_STEP_AT = re.compile(r"[^\s./:]+(\.[^\s./:]+)*:[^\s./:]+(\.[^\s./:]+)*")


@click.command("run", cls=OneScreenCommand, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@output_option(default=Path("artifacts"), file_okay=False, help="Folder of the records; default: artifacts.")
@click.option("--report/--no-report", default=True, help="Report when COMMAND ends (default).")
@click.option("--continue", "goes_on", is_flag=True, help="Go on with the run in the folder, not a new one.")
@click.option("--open", "open_page", is_flag=True, help="Open the report's page in a browser.")
@click.option("--hang", is_flag=True, help="Watch for hangs and name the rank waited for.")
@click.option(
    "--to",
    "sinks",
    multiple=True,
    metavar="KIND=TARGET",
    help="Send numbers on: prometheus=:9400; may repeat.",
)
@click.option("--step-at", metavar="MODULE:FUNCTION", help="Calls of this function are the steps.")
@rare(
    "--overhead",
    metavar="SHARE",
    default="1%",
    show_default=True,
    section="Cost and size",
    help="What recording may cost of the step time; off: record every step.",
)
@rare(
    "--kernels",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    section="Sources and sinks",
    help="The driver's kernel records: auto on CUDA, on for ROCm too, off for events alone.",
)
@rare(
    "--stacks",
    type=click.Choice(["on", "off"]),
    default="on",
    section="Sources and sinks",
    help="off: no stacks are sampled, and causes name no lines of the program.",
)
@rare(
    "--hang-timeout-s",
    type=NumberRange(0.1),
    metavar="SECONDS",
    section="Sources and sinks",
    help="Watch for hangs: time without a step after which the ranks report (300).",
)
def run_command(
    output: Path, report: bool, goes_on: bool, open_page: bool, command: tuple[str, ...], **options: Any
) -> int:
    """Run COMMAND and record every process of it that trains, without changing its code.

    aorta run -- torchrun --nproc_per_node 8 train.py --my-option

    Works with torchrun, python, accelerate, deepspeed, srun and the processes that they start on this
    machine. The exit status is the command's. --to takes prometheus=:PORT or
    prometheus=FILE, tensorboard=DIR, opentelemetry=URL, wandb=PROJECT and mlflow=EXPERIMENT. What is
    recorded: docs/run.md.
    """
    from aorta.attach.settings import AttachSettings, environment_for
    from aorta.records.launches import OUTER, VARIABLE, new_notes, own_launches
    from aorta.records.run_identity import CONTINUES

    _check(options)
    options |= {"sinks": list(options["sinks"]), "stacks": options["stacks"] == "on"}
    options |= {"hang": options["hang"] or options["hang_timeout_s"] is not None}
    settings = AttachSettings(output=str(output.absolute()), **options)
    check_start(command, output, settings.step_at)
    began_ns = time.time_ns()
    environment = environment_for(settings, dict(os.environ))
    if goes_on and (run_id := run_in(output)) is not None:
        environment[CONTINUES] = run_id
    notes = new_notes(output.absolute())
    environment[OUTER] = ":".join(own_launches())
    environment[VARIABLE] = str(notes)
    if settings.kernels == "on" and os.path.exists(AMD_DRIVER):
        _name_tool(environment)
    status = run_to_end(list(command), environment, notes=notes)
    if is_first_launch():
        try:
            if not _conclude(output, report, open_page, began_ns, settings.kernels == "on", status, notes):
                from aorta.attach.coverage import earlier_run

                for line in earlier_run(output, began_ns, notes, goes_on):
                    click.echo(line, err=True)
        except BrokenPipeError:
            discard_output()
    return status


def _check(options: dict[str, Any]) -> None:
    from aorta.records.overhead import overhead_limit

    overhead_limit(options["overhead"])
    if options["sinks"]:
        from aorta.sinks import check_target

        for sink in options["sinks"]:
            check_target(sink)


def run_in(folder: Path) -> str | None:
    """The run that is recorded in the folder, to go on with; None, and a line, where there is none."""
    from aorta.errors import RecordError
    from aorta.records.reader import read_run

    why = "no run is recorded there"
    try:
        if (folder / "run.json").exists() and (run_id := read_run(folder).run_id) is not None:
            return run_id
    except RecordError as error:  # it ends no job
        why = str(error)
    click.echo(f"aorta: --continue: a new run begins in {folder}: {why}", err=True)
    return None


def check_start(command: Sequence[str], output: Path, step_at: str | None) -> None:
    """Raise ConfigError where the command cannot be started, or its records cannot be written."""
    if shutil.which(command[0]) is None:
        why = "no such command"
        if os.path.isdir(command[0]):
            why = "a folder, no command; aorta report and aorta why read a run"
        elif os.path.exists(command[0]):
            why = (
                "a file that may not be executed: name the program that reads it first, as in python train.py"
            )
        raise ConfigError(f"{command[0]}: {why}")
    check_output(output)
    if step_at is not None:
        if _STEP_AT.fullmatch(step_at) is None:
            raise ConfigError(f"--step-at must look like module:function, got {step_at!r}")
        check_module(step_at, command)


def check_output(folder: Path) -> None:
    """Raise ConfigError where no record can be written, before the command runs for hours unrecorded."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(f"cannot record into {folder}: {place} is no folder; choose another with -o")
    refusal = ConfigError(f"cannot record into {folder}: {place} cannot be written; choose another with -o")
    if not os.access(place, os.W_OK | os.X_OK):
        raise refusal
    try:  # access() tells root that it may write into /proc. A full disk refuses no job.
        tempfile.TemporaryDirectory(dir=place, prefix=".aorta_").cleanup()
    except (PermissionError, FileNotFoundError):
        raise refusal from None


def check_module(target: str, command: Sequence[str]) -> None:
    """Raise ConfigError where the command, run by this Python, will find no module that --step-at names."""
    from importlib.machinery import PathFinder

    name = target.partition(":")[0].partition(".")[0]
    program = shutil.which(command[0])
    if program is None or Path(program).parent != Path(sys.executable).parent or name == "__main__":
        return  # another Python: what it finds is not known here
    scripts = [str(Path(word).absolute().parent) for word in command if word.endswith(".py")]
    if (
        name not in sys.builtin_module_names
        and PathFinder.find_spec(name, [*scripts, os.getcwd(), *sys.path]) is None
    ):
        raise ConfigError(f"--step-at {target}: there is no module {name}; name it as the program imports it")


def _name_tool(environment: dict[str, str]) -> None:
    """Name aorta's tool to rocprofiler-sdk, before a process initialises HIP."""
    from aorta.device.kernel_records import KernelRecordsUnavailable, name_tool

    try:
        name_tool(environment)
    except KernelRecordsUnavailable as error:
        click.echo(f"aorta: --kernels on has no effect: {error}", err=True)


def run_to_end(command: list[str], environment: dict[str, str], notes: Path | None = None) -> int:
    """Run the command, pass signals on to it, and return its exit status: 128 + n after signal n.

    notes: the file that says what the command was sent and how it ended, where it recorded anything.
    """
    from aorta.records.launches import note

    process = subprocess.Popen(command, env=environment)

    def noted(number: int) -> None:
        if notes is not None and notes.parent.is_dir():
            note(notes, "signal", signal=signal.Signals(number).name, pid=process.pid)

    with passed_on(process, noted):
        status = process.wait()
    is_recorded = notes is not None and notes.parent.is_dir()
    if notes is not None and is_recorded and (status != 0 or _says_nothing(process.pid, notes.parent)):
        note(notes, "end", code=status, pid=process.pid)
    return 128 - status if status < 0 else status


def _says_nothing(pid: int, folder: Path) -> bool:
    """Whether the process recorded and did not say how it ended: it may have closed all its files."""
    from aorta.records.state import read_states

    processes = [state.process for state in read_states(folder).values()]
    return any(one.pid == pid and one.ending is None for one in processes)


@contextmanager
def passed_on(
    process: "subprocess.Popen[bytes]", noted: Callable[[int], None] = lambda number: None
) -> Iterator[None]:
    """Pass SIGTERM and SIGHUP on to the process; the terminal itself sends Ctrl-C to both.

    noted: called with each signal that came, before it is passed on.
    """

    def pass_on(number: int, _: object) -> None:
        noted(number)
        if number != signal.SIGINT:
            process.send_signal(number)

    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, pass_on),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGHUP: signal.signal(signal.SIGHUP, pass_on),
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _conclude(
    output: Path, report: bool, open_page: bool, began_ns: int, kernels_asked: bool, status: int, notes: Path
) -> bool:
    """Report what was recorded; False where nothing was. Mistakes here do not change the command's status."""
    from aorta.attach.coverage import coverage_lines, is_held, other_runs, own_folder
    from aorta.errors import AortaError, not_installed
    from aorta.records.reader import read_run

    recorded = own_folder(output, began_ns, notes)
    if recorded is None:
        if is_held(output, began_ns, notes):
            why = "another command records there; choose another folder with -o"
        elif status:
            why = f"the command ended with status {status} before a step that aorta saw"
        else:
            why = (
                "no process that aorta reached trained with torch, unless it records itself. It cannot "
                "reach python -I, -E or -S, env -i, or other machines (docs/run.md)"
            )
        click.echo(f"aorta: nothing was recorded in {output}: {why}", err=True)
        return False
    if recorded != output:
        says = f"another command records into {output}: this one recorded in {recorded}"
        if recorded.name.startswith("previous-"):
            says = f"another command has moved what this one recorded to {recorded}"
        click.echo(f"aorta: {says}", err=True)
    try:
        if report:
            from aorta.cli.report import label_of, report_folder, write_and_print

            labels = [label_of(recorded.resolve().name)]
            write_and_print([recorded], labels, report_folder(recorded), open_page=open_page)
        for line in coverage_lines(read_run(recorded), recorded, kernels_asked):
            click.echo(line, err=True)
        for line in other_runs(recorded, began_ns, notes):
            click.echo(line, err=True)
    except AortaError as error:
        click.echo(f"aorta: {error}", err=True)
    except BrokenPipeError:
        raise
    except Exception as error:  # of ours: the job must not seem to have failed
        what = not_installed(error) if isinstance(error, ModuleNotFoundError) else None
        what = what or f"the report failed, a mistake in aorta: {type(error).__name__}: {error}"
        click.echo(f"aorta: recorded in {output}; {what}", err=True)
    sys.stdout.flush()
    return True
