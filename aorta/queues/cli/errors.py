"""What a user can fix is one line on stderr and exit code 2, once however many ranks there are."""

import os
import sys

import click

from aorta.exit_codes import BAD_INPUT


def say(message: str) -> None:
    """All ranks of a run find the same mistake; the first one says it."""
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"error: {' '.join(message.split())}", err=True)


def refuse(message: str) -> None:
    """Ends the process."""
    say(message)
    sys.exit(BAD_INPUT)
