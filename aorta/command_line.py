"""Click for every command of aorta: one-line mistakes, help of one screen, commands that load late.

Imported by commands only, so that aorta itself does not load click.
"""

import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from aorta.errors import BAD_INPUT, FINE, INTERRUPTED, AortaError, ConfigError, did_you_mean, not_installed
from aorta.launcher import is_first_rank

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of what is written."""
FIXABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
"""Errors of files that only a name that the user gave, or one below it, can cause."""

SHOWS_ALL = "aorta.help_all"
"""Key of a context's meta: the help that is being written lists rare options as well."""

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


# ---- help of one screen --------------------------------------------------------------------------


class RareOption(click.Option):
    """An option that `--help` leaves out and `--help-all` lists under its section."""

    def __init__(self, *args: Any, section: str, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.section = section


def rare(*names: str, section: str = "Rare", **attributes: Any) -> Callable[[Decorated], Decorated]:
    """`click.option` for an option that few people need: only `--help-all` shows it.

    The command must be a OneScreenCommand. section: the heading above the option there.
    """
    return click.option(*names, cls=RareOption, section=section, **attributes)


def option_group(*options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """A decorator that adds several options; the help lists them in the order given."""

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


class OneScreenCommand(click.Command):
    """A command whose `--help` fits a screen: options that are not daily are listed by `--help-all` alone."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.params.append(_help_all_option())  # without rare options it shows what --help shows

    def is_daily(self, option: click.Option) -> bool:
        return not isinstance(option, RareOption)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        rare = () if SHOWS_ALL in ctx.meta else self._rare_options(ctx)
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None and option not in rare:
                title = option.section if isinstance(option, RareOption) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        num_rare = len(self._rare_options(ctx))
        if num_rare and SHOWS_ALL not in ctx.meta:
            noun = "options" if num_rare > 1 else "option"
            formatter.write(f"\n{num_rare} more {noun}: {ctx.command_path} --help-all\n")

    def _rare_options(self, ctx: click.Context) -> list[click.Option]:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        # Eager ones, such as --help, answer by themselves.
        return [one for one in options if not (one.hidden or one.is_eager or self.is_daily(one))]


def _help_all_option() -> click.Option:
    def show(ctx: click.Context, _: click.Parameter, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            ctx.meta[SHOWS_ALL] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    # Eager: required arguments are not asked for. Hidden: the last line of --help names it.
    return click.Option(
        ["--help-all"], is_flag=True, is_eager=True, expose_value=False, hidden=True, callback=show
    )


# ---- mistakes of one line, exit codes ------------------------------------------------------------


class OneLine(click.Command):
    """A program that reports what a user can fix in one line, without the usage above it.

    A command's integer result is the exit code. A reader that goes away (`| head`) and Ctrl-C end quietly.
    A command with a verdict prints within `output_of_verdict`.
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
        except ModuleNotFoundError as error:
            if (message := not_installed(error)) is None:
                raise
            self.say(message)
            sys.exit(BAD_INPUT)
        except OSError as error:
            if error.filename is None and error.errno in NO_ROOM:  # of standard output, mostly
                discard_output()
                self.say(f"not all could be written: {error.strerror}")
                sys.exit(BAD_INPUT)
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
        """Print a mistake once: all ranks of a run find it, and the first one speaks."""
        if is_first_rank():
            try:
                click.echo(f"error: {' '.join(message.splitlines())}", err=True)
            except BrokenPipeError:
                discard_output()


@contextmanager
def output_of_verdict() -> Iterator[None]:
    """Print within a command that has a verdict: if the reader goes away (`| head`), the command continues,
    because the verdict is still its exit code."""
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
    """Let the interpreter flush its streams at its end without an error, though nobody takes what is left."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


# ---- groups --------------------------------------------------------------------------------------


class OneLineCommand(OneLine, OneScreenCommand):
    """A command that is a program by itself."""


class OneLineGroup(OneLine, click.Group):
    """A group whose own commands are OneScreenCommands."""

    command_class = OneScreenCommand


class LazyGroup(OneLineGroup):
    """A group whose commands are imported when they are called; its help needs none of them."""

    def __init__(
        self,
        *args: Any,
        commands: Mapping[str, tuple[str, str]],
        sections: Mapping[str, Iterable[str]] | None = None,
        **extra: Any,
    ) -> None:
        """commands: by name the place of the click command, "module:attribute", and its short help.

        sections: names of commands by heading. With them `--help` lists the commands on a screen of 24
        lines, and `--help-all` the group's options and its epilog as well.
        """
        super().__init__(*args, **extra)
        self._places = dict(commands)
        self._sections = {title: list(names) for title, names in (sections or {}).items()}
        self.params.append(_help_all_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self._sections or SHOWS_ALL in ctx.meta:
            super().format_help(ctx, formatter)
            return
        # Without blank lines between the sections: 24 lines hold every command, and a prompt.
        more = f"options, exit codes: {ctx.command_path} --help-all"
        formatter.write_usage(ctx.command_path, f"COMMAND [ARGS]...   {more}")
        formatter.write(f"{self.help}\n")
        for title, names in self._sections.items():
            formatter.write_heading(title)
            with formatter.indentation():
                formatter.write_dl(self._help_rows(names))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in (self._sections or {"Commands": list(self._places)}).items():
            with formatter.section(title):
                formatter.write_dl(self._help_rows(names))

    def _help_rows(self, names: Iterable[str]) -> list[tuple[str, str]]:
        return [(name, self._places[name][1]) for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._places and not args[0].startswith("-"):
            otherwise = f"; commands: {', '.join(self._places)}"
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


def module_environment() -> dict[str, str]:
    """The environment for `python -m aorta...` in a process that may start in another folder.

    Puts the folder that holds aorta on PYTHONPATH, so that a checkout that is not installed works as well.
    """
    home = str(Path(__file__).resolve().parents[1])
    others = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([home, others] if others else [home])}
