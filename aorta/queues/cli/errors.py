"""Errors that a user can fix: one line on stderr and exit code 2, once however many ranks there are."""

import sys

import click

from aorta.exit_codes import BAD_INPUT
from aorta.launcher import is_first_rank


def say(message: str) -> None:
    """All ranks of a run find the same mistake; the first one says it."""
    if is_first_rank():
        click.echo(f"error: {' '.join(message.split())}", err=True)


def refuse(message: str) -> None:
    """Ends the process."""
    say(message)
    sys.exit(BAD_INPUT)
