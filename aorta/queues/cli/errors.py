"""What a user can fix is one line on stderr and exit code 2, once however many ranks there are."""

import sys

import click

from aorta import command_line
from aorta.launcher import is_first_rank


class OneLineGroup(command_line.OneLineGroup):
    """Mistakes in options and files are one line, without the usage above it."""

    def say(self, message: str) -> None:
        say(message)


def say(message: str) -> None:
    """All ranks of a run find the same mistake; the first one says it."""
    if is_first_rank():
        click.echo(f"error: {' '.join(message.split())}", err=True)


def refuse(message: str) -> None:
    """Ends the process."""
    say(message)
    sys.exit(command_line.BAD_INPUT)
