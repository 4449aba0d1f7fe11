"""What a user can fix is one line on stderr and exit code 2, once however many ranks there are."""

import os
import sys
from typing import Any

import click

from aorta.errors import AortaError

BAD_INPUT = 2


class OneLineGroup(click.Group):
    """Mistakes in options and files are one line, without the usage above it."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Any = super().main  # click declares overloads that cannot be passed on
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        try:
            result = run(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(BAD_INPUT)
        except click.ClickException as error:
            refuse(error.format_message())
        except AortaError as error:
            refuse(str(error))
        except click.Abort:
            sys.exit(130)
        sys.exit(result if isinstance(result, int) else 0)


def refuse(message: str) -> None:
    """Ends the process. All ranks of a run find the same mistake; the first one says it."""
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(BAD_INPUT)
