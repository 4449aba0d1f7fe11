"""The help fits a screen: rare options are listed by --help-all alone."""

import click
from click.testing import CliRunner

from aorta.cli import COMMANDS
from aorta.command_line import OneLineGroup, rare
from aorta.exit_codes import FINE
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
