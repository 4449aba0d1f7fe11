"""A command group whose mistakes are one line on stderr and exit code 2.

Imported by commands only, so that aorta itself does not load click.
"""

import sys
from typing import Any

import click

from aorta.errors import AortaError

BAD_INPUT = 2


class OneLineGroup(click.Group):
    """What a user can fix, in options or in files, is one line without the usage above it.

    A command's integer result is the exit code.
    """

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        run: Any = super().main  # click declares overloads that cannot be passed on
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        try:
            result = run(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # click >= 8.2: the message is the help
                error.show()
            else:
                self.say(" ".join(error.format_message().split()))
            sys.exit(BAD_INPUT)
        except AortaError as error:
            self.say(str(error))
            sys.exit(BAD_INPUT)
        except click.Abort:
            sys.exit(130)
        sys.exit(result if isinstance(result, int) else 0)

    def say(self, message: str) -> None:
        """Shows a mistake. A command of many ranks, all of which find it, may let one of them speak."""
        click.echo(f"error: {message}", err=True)
