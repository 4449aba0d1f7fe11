"""python -m aorta.hw_queue_eval: what many streams really do."""

import importlib
from typing import Any

import click

from aorta.hw_queue_eval.cli.errors import OneLineGroup

_COMMANDS = {
    "list": "aorta.hw_queue_eval.cli.list:list_command",
    "run": "aorta.hw_queue_eval.cli.run:run_command",
    "sweep": "aorta.hw_queue_eval.cli.run:sweep_command",
    "run-priority": "aorta.hw_queue_eval.cli.run:priority_command",
    "compare": "aorta.hw_queue_eval.cli.compare:compare_command",
    "profile": "aorta.hw_queue_eval.cli.profile:profile_command",
    "probe": "aorta.hw_queue_eval.probe:probe_command",
}


class LazyGroup(OneLineGroup):
    """Imports a command when it is asked for: compare needs no torch."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[name].partition(":")
        command: Any = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"max_content_width": 110})
def main() -> None:
    """What GPU queues do with 1 to 64 concurrent streams."""
