"""python -m aorta.queues: what many streams really do."""

import ast
import importlib.util
from pathlib import Path
from typing import Any

import click

from aorta.errors import ConfigError, did_you_mean
from aorta.queues.cli.errors import OneLineGroup

_COMMANDS = {
    "list": "aorta.queues.cli.list:list_command",
    "run": "aorta.queues.cli.run:run_command",
    "sweep": "aorta.queues.cli.run:sweep_command",
    "run-priority": "aorta.queues.cli.run:priority_command",
    "compare": "aorta.queues.cli.compare:compare_command",
    "profile": "aorta.queues.cli.profile:profile_command",
    "probe": "aorta.queues.probe.cli:probe_command",
}


def _first_sentence(target: str) -> str:
    """Of a command's docstring, read without importing its module."""
    module, _, function = target.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    body = ast.parse(Path(found.origin).read_text()).body
    (command,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == function)
    return (ast.get_docstring(command) or "").partition(".")[0] + "."


class LazyGroup(OneLineGroup):
    """Imports a command when it is asked for: compare needs no torch, nor does the list of commands."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(target)) for name, target in _COMMANDS.items()])

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            otherwise = f"; there is {', '.join(_COMMANDS)}"
            raise ConfigError(f"{args[0]} is not a command{did_you_mean(args[0], _COMMANDS, otherwise)}")
        return super().resolve_command(context, args)

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
