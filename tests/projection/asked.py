"""Answers and refusals of `aorta project`, for tests of its commands."""

import json
from typing import Any

from click.testing import CliRunner

from aorta.projection.cli import main


def answer(*arguments: Any) -> Any:
    """What a command prints with --json."""
    result = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: Any) -> str:
    """The one line of a mistake that the user can fix."""
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line
