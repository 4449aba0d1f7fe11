"""docs/programs.md shows what the commands print: every console block is run again."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.programs.cli import main
from aorta.programs.language.emit import ORDERS
from aorta.programs.simulator import Costs, Machine, duration_us, simulate
from tests.programs.named import emit_named

DOCUMENT = Path(__file__).parents[2] / "docs" / "programs.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREFIX = "python -m aorta.host_ir "


def commands():
    """(command, expected output) of every line that begins with $, in the order of the document."""
    for block in BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            yield command, expected


def shell(command, folder):
    """Pipes, > FILE and cat, which is all that the document uses."""
    command, _, target = command.partition(" > ")
    data, exit_code = None, 0
    for stage in command.split(" | "):
        if stage.startswith("cat "):
            data = (folder / stage.removeprefix("cat ")).read_text()
            continue
        assert stage.startswith(PREFIX), stage
        words = shlex.split(stage.removeprefix(PREFIX))
        words = [str(folder / word) if (folder / word).is_file() else word for word in words]
        result = CliRunner().invoke(main, words, input=data)
        data, exit_code = result.stdout + result.stderr, result.exit_code
    if target:
        (folder / target).write_text(data)
        return "", exit_code
    return data, exit_code


@pytest.mark.heavy
def test_every_command_of_the_document_prints_what_it_shows(tmp_path):
    found = list(commands())
    assert len(found) >= 7
    for command, expected in found:
        printed, _ = shell(command, tmp_path)
        assert printed.rstrip("\n") == expected.rstrip("\n"), command


@pytest.mark.parametrize(("order", "false_edges"), [("factorized", 7), ("developed", 0)])
def test_the_document_states_the_counts_of_lint(order, false_edges):
    text = DOCUMENT.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| `{order}`"))
    assert row.split("|")[4].strip() == str(false_edges)


def cells(first):
    """Name and numbers of the rows of the table whose head begins with this."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {first}"))
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            return
        name, *values = (cell.strip(" `") for cell in line.strip("|").split("|"))
        yield name, [int(value) for value in values]


def test_the_table_of_queues_is_what_the_simulator_gives():
    machines = [Machine(num_queues=queues) for queues in (1, 2, 4, 8)]
    machines += [Machine(num_queues=queues, model="aql-barrier") for queues in (1, 4)]
    rows = list(cells("order | 1 queue"))
    assert [name for name, _ in rows] == list(ORDERS)
    for name, values in rows:
        program = emit_named(name)
        assert values == [duration_us(simulate(program, Costs(comm_us=1, gemm_us=1), m)) for m in machines]
