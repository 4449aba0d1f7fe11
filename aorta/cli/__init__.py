"""The command `aorta`: which command is in which file, and in which section of the help."""

import click

from aorta._version import __version__
from aorta.command_line import LazyGroup

SECTIONS = {
    "Daily": {
        "run": ("aorta.cli.run:run_command", "Record any training command, without changing its code."),
        "report": ("aorta.cli.report:report_command", "Show where a step's time goes: table and page."),
        "why": ("aorta.cli.why:why_command", "The long form of report: causes in ms, fixes, what-ifs."),
        "compare": ("aorta.cli.report:compare_command", "Compare two runs or traces, with verdicts."),
        "top": ("aorta.cli.job:top_command", "Watch a running job: steps, waits, memory, straggler."),
        "hang": ("aorta.cli.job:hang_command", "Name the rank and the collective a stuck job waits for."),
        "check": ("aorta.cli.check:check_command", "Find races between streams, and confirm them."),
        "train": ("aorta.cli.train:train_command", "Train aorta's small decoder: DDP, FSDP, TP, MoE."),
        "doctor": (
            "aorta.cli.doctor:doctor_command",
            "Check what works on this machine; how to fix the rest.",
        ),
    },
    "Around a run": {
        "capture": ("aorta.cli.job:capture_command", "Trace the kernels of a running job's next steps."),
        "merge": ("aorta.cli.job:merge_command", "Add the numbers of kernel traces to a run's records."),
        "gate": ("aorta.cli.gate:gate_command", "Judge a run against a blessed baseline; for CI."),
        "ab": ("aorta.cli.ab:ab_command", "Tell two variants of a command apart: runs in turn."),
        "sweep": ("aorta.cli.sweep:sweep_command", "Run a command under settings x environments x trials."),
        "demo": ("aorta.cli.train:demo_command", "Train two ranks on this machine and report."),
    },
    "Systems": {
        "queues": ("aorta.queues.cli:main", "Measure GPU queues with 1 to 64 concurrent streams."),
        "program": ("aorta.programs.cli:main", "Emit, lint, simulate and run host programs of overlap."),
        "project": ("aorta.projection.cli:main", "Predict step time and memory on other hardware."),
    },
}
"""Commands by section and name: where the command is, "module:attribute", and its line in the help."""
COMMANDS = {name: entry for section in SECTIONS.values() for name, entry in section.items()}

EPILOG = (
    "Exit codes: 0 fine; 1 a limit is violated, or slower; "
    '2 bad input; 3 cannot tell. Shell completion: eval "$(_AORTA_COMPLETE=bash_source aorta)" '
    "(zsh_source, fish_source)."
)


@click.group(
    cls=LazyGroup,
    commands=COMMANDS,
    sections=SECTIONS,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="aorta")
def main() -> None:
    """Shows where a distributed PyTorch training step loses its time."""
