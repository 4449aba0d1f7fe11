"""The command `aorta`. Each subcommand is a module here that imports what it needs when it is called."""

import click

from aorta._version import __version__
from aorta.command_line import LazyGroup

COMMANDS = {
    "run": ("aorta.cli.run:run_command", "Record any training command, without changing its code."),
    "report": ("aorta.cli.report:report_command", "Where the time of a run or a trace goes: table, page."),
    "why": ("aorta.cli.why:why_command", "Causes of a long step with milliseconds, and what would help."),
    "compare": ("aorta.cli.report:compare_command", "Two runs or traces against each other, with verdicts."),
    "top": ("aorta.cli.top:top_command", "Watch a running job: steps, waits, memory, clocks, straggler."),
    "capture": (
        "aorta.cli.capture:capture_command",
        "Ask a running job to trace the kernels of its next steps.",
    ),
    "merge": ("aorta.cli.merge:merge_command", "Add what kernel traces beside a run's records say to them."),
    "hang": ("aorta.cli.hang:hang_command", "Which rank and which collective do the others wait for?"),
    "train": ("aorta.cli.train:train_command", "Train aorta's small decoder: DDP, FSDP, TP, MoE."),
    "demo": ("aorta.cli.demo:demo_command", "Train two ranks on this machine and report."),
    "sweep": ("aorta.cli.sweep:sweep_command", "Training runs over settings and environment variables."),
    "queues": ("aorta.queues.cli:main", "What GPU queues do with 1 to 64 concurrent streams."),
    "program": ("aorta.programs.cli:main", "Host programs of overlapped loops: emit, lint, simulate, run."),
    "project": ("aorta.projection.cli:main", "Step time and memory on hardware that is not here."),
    "doctor": (
        "aorta.cli.doctor:doctor_command",
        "What works on this machine, and what to do about the rest.",
    ),
}

EPILOG = (
    "Exit codes: 0 fine; 1 a limit is violated, or a difference was found where asked to fail; "
    '2 bad input; 3 cannot tell. Shell completion: eval "$(_AORTA_COMPLETE=bash_source aorta)" '
    "(zsh_source, fish_source)."
)


@click.group(
    cls=LazyGroup,
    commands=COMMANDS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="aorta")
def main() -> None:
    """Where a distributed PyTorch training step loses its time."""
