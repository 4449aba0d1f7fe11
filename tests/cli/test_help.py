"""The help fits a screen: rare options are listed by --help-all alone."""

import itertools

import click
import pytest
from click.testing import CliRunner

from aorta.cli import COMMANDS, SECTIONS, main
from aorta.command_line import OneLineGroup, rare
from aorta.errors import FINE
from tests.cli.examples import run

COLUMNS = 80


@click.group(cls=OneLineGroup)
def tool() -> None:
    """A group with one command."""


@tool.command("copy")
@click.argument("path")
@click.option("--to", help="Where to copy.")
@rare("--block-size", type=int, default=4, section="Disks", help="Bytes at a time.")
@rare("--retries", type=int, default=0, help="Tries after the first.")
def copy(path: str, to: str, block_size: int, retries: int) -> None:
    """Copy a file."""
    click.echo(f"{path} {block_size} {retries}")


def copied(*arguments: str) -> str:
    result = CliRunner().invoke(tool, ["copy", *arguments], prog_name="tool")
    assert result.exit_code == FINE
    return result.output


def test_a_rare_option_is_left_out_of_the_help() -> None:
    text = copied("--help")
    assert "--to" in text
    assert "--block-size" not in text
    assert text.splitlines()[-1] == "2 more options: tool copy --help-all"


def test_the_whole_help_lists_rare_options_by_section() -> None:
    text = copied("--help-all")  # without the argument that the command needs
    assert text.index("--to") < text.index("\nDisks:\n") < text.index("--block-size")
    assert text.index("--block-size") < text.index("\nRare:\n") < text.index("--retries")
    assert "more option" not in text


def test_a_rare_option_is_taken_like_any_other() -> None:
    assert copied("here", "--block-size", "8") == "here 8 0\n"


def test_every_command_is_listed_within_a_small_screen() -> None:
    lines = run("--help").output.splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) < COLUMNS
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)


def test_the_whole_help_has_exit_codes_and_options() -> None:
    text = run("--help-all").output
    assert "Exit codes: 0 fine" in text
    assert "--version" in text


def test_why_is_the_long_form_of_report() -> None:
    assert "why      The long form of report" in run("--help").output


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - SECTIONS["Systems"].keys()))
def test_a_help_fits_a_screen_with_a_line_per_option(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"], prog_name="aorta", env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= COLUMNS
    options = lines[lines.index("Options:") + 1 :]
    rows = list(itertools.takewhile(str.strip, options))
    assert not [row for row in rows if not row.startswith("  -")], "a row is longer than its line"


@pytest.mark.parametrize("names", [("report", "compare"), ("report", "why"), ("compare", "why")])
def test_an_option_of_two_commands_is_declared_alike(names: tuple[str, str]) -> None:
    """With one type, value name and help."""
    first, second = ({o.opts[0]: o for o in options_of(name)} for name in names)
    shared = first.keys() & second.keys()
    assert {"--json", "--warmup", "--jobs", "--dask"} <= shared
    for name in shared - {"--output"}:
        assert repr(first[name].type) == repr(second[name].type)
        assert first[name].metavar == second[name].metavar
        assert first[name].help == second[name].help


def options_of(name: str) -> list[click.Option]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return [option for option in command.params if isinstance(option, click.Option)]
