"""python -m aorta.queues: what many streams really do."""

import click

from aorta.command_line import LazyGroup

COMMANDS = {
    "list": (
        "aorta.queues.cli.list:list_command",
        "The workloads: what each asks, and in which unit it answers.",
    ),
    "run": ("aorta.queues.cli.run:run_command", "Measure WORKLOAD at one stream count."),
    "sweep": ("aorta.queues.cli.run:sweep_command", "Measure WORKLOAD over stream counts."),
    "run-priority": (
        "aorta.queues.cli.run:priority_command",
        "Measure every workload of a priority over stream counts.",
    ),
    "compare": ("aorta.queues.cli.compare:compare_command", "Judge TEST against BASELINE."),
    "profile": (
        "aorta.queues.cli.profile:profile_command",
        "Run WORKLOAD in a process of its own under a profiler.",
    ),
    "probe": (
        "aorta.queues.probe.cli:probe_command",
        "Count hardware queues; measure what a switch costs and what priorities do.",
    ),
}


@click.group(
    cls=LazyGroup, commands=COMMANDS, context_settings={"max_content_width": 110, "show_default": True}
)
def main() -> None:
    """Measure how GPU queues handle 1 to 64 concurrent streams."""
