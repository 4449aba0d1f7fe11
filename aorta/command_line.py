"""What every command shares: groups whose mistakes are one line, commands that load late.

Imported by commands only, so that aorta itself does not load click.
"""

import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from aorta.errors import AortaError, ConfigError, did_you_mean
from aorta.exit_codes import BAD_INPUT, FINE, INTERRUPTED
from aorta.launcher import is_first_rank

FIXABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
"""Of errors of files: what only a name that was given, or one below it, can be."""


class OneLineGroup(click.Group):
    """What a user can fix, in options or in files, is one line without the usage above it.

    A command's integer result is the exit code. A reader that goes away (`| head`) and Ctrl-C end quietly.
    What a command with a verdict prints is printed within `output_of_verdict`.
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
        except OSError as error:
            if error.errno not in FIXABLE or error.filename is None:
                raise
            name = os.fsdecode(error.filename)
            self.say(f"{name if len(name) < 200 else name[:40] + '...'}: {error.strerror}")
            sys.exit(BAD_INPUT)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        sys.exit(result if isinstance(result, int) else FINE)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:  # the help, printed while options are read
            discard_output()
            sys.exit(FINE)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # here, because click would make exit code 1 of it
            discard_output()
            return FINE
        except SystemExit as ending:
            if not isinstance(ending.__context__, BrokenPipeError):
                raise
            discard_output()  # rich's consoles answer a broken pipe with exit code 1
            return FINE
        return result

    def say(self, message: str) -> None:
        """Shows a mistake once: all ranks of a run find it, and the first one speaks."""
        if is_first_rank():
            try:
                click.echo(f"error: {message}", err=True)
            except BrokenPipeError:
                discard_output()


class LazyGroup(OneLineGroup):
    """A group whose commands are imported when they are called; its help needs none of them."""

    def __init__(self, *args: Any, commands: Mapping[str, tuple[str, str]], **extra: Any) -> None:
        """commands: by name the place of the click command, "module:attribute", and its short help."""
        super().__init__(*args, **extra)
        self._places = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._places.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._places and not args[0].startswith("-"):
            otherwise = f"; there is {', '.join(self._places)}"
            raise ConfigError(f"{args[0]} is not a command{did_you_mean(args[0], self._places, otherwise)}")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._places:
            return None
        module, _, attribute = self._places[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "aorta":
                raise
            raise ConfigError(f"{cmd_name} cannot be loaded: {error}") from None
        assert isinstance(command, click.Command)
        return command


@contextmanager
def output_of_verdict() -> Iterator[None]:
    """Printing within a command that has a verdict: where the reader has gone away (`| head`) the command
    goes on, because the verdict is still its exit code."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
    except SystemExit as ending:
        if not isinstance(ending.__context__, BrokenPipeError):
            raise
        discard_output()  # rich's consoles answer a broken pipe with exit code 1


def discard_output() -> None:
    """After a broken pipe: let the interpreter flush its streams at its end without an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def module_environment() -> dict[str, str]:
    """The environment for `python -m aorta...` in a process that may start in another folder.

    Puts the folder that holds aorta on PYTHONPATH, so that a checkout that is not installed works as well.
    """
    home = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([home, others] if others else [home])}
