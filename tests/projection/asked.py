"""Answers and refusals of `aorta project`, for tests of its commands."""

import json
from typing import Any

from click.testing import CliRunner, Result

from aorta.hardware.part import Hardware
from aorta.projection.cli import main
from aorta.projection.model import Model
from aorta.projection.options import read
from aorta.projection.plan import Plan


def run(*arguments: Any) -> Result:
    """What becomes of a command, mistakes included."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def answer(*arguments: Any) -> Any:
    """What a command prints with --json."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def flags(*arguments: Any) -> tuple[Model, Plan, Hardware]:
    """What the command line reads from options."""
    context = main.commands["memory"].make_context("memory", [str(argument) for argument in arguments])
    return read(context.params)


def refused(*arguments: Any) -> str:
    """The one line of a mistake that the user can fix."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line
