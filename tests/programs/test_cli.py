"""The commands: what they print, what they return, and that they need no torch."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from aorta.programs.cli import main
from aorta.programs.language.text import format_program, parse_program
from tests.programs.named import emit_named


def run(*arguments, given=None):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=given)


@pytest.fixture
def factorized(tmp_path):
    path = tmp_path / "factorized.txt"
    path.write_text(
        run("emit", "--op", "ag_gemm", "--order", "factorized", "--tiles", 8, "--streams", 4).stdout
    )
    return path


def test_emit_prints_the_program_of_a_named_order(factorized):
    assert parse_program(factorized.read_text()) == emit_named("factorized")


def test_lint_names_the_false_edges_and_their_chains(factorized):
    found = json.loads(run("lint", factorized, "--json").stdout)
    assert found["missing_edges"] == []
    assert len(found["false_edges"]) == 7
    chain = found["false_edges"][0]["chain"]
    assert [link["line"] for link in chain] == [13, 15, 16, 9, 10, 11]
    text = run("lint", factorized).stdout
    assert text.startswith("ag_gemm   2 ranks   0 missing edges   7 false edges   ranks agree")
    assert "line 16  i=0  main       wait(joined[0])" in text
    assert "and 6 more like this (--all)" in text
    assert run("lint", factorized, "--all").stdout.count("false edge ") == 7


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--order", "factorized"), 0),
        (("--fork", "none"), 1),
        (("--op", "gemm_rs", "--staging", "2"), 1),
        (("--op", "gemm_rs", "--staging", "4"), 0),
    ],
)
def test_lint_returns_one_for_a_race_and_zero_for_false_edges(arguments, code):
    program = run("emit", *arguments).stdout
    assert run("lint", "-", given=program).exit_code == code


def test_lint_of_one_program_per_rank_returns_one_where_they_do_not_meet(tmp_path):
    paths = []
    for tiles in (2, 3):
        paths.append(tmp_path / f"{tiles}.txt")
        paths[-1].write_text(run("emit", "--tiles", tiles).stdout)
    result = run("lint", *paths)
    assert result.exit_code == 1
    assert "ranks do not agree" in result.stdout


def test_simulate_prints_time_bounds_waterfall_and_timeline(factorized):
    found = json.loads(run("simulate", factorized, "--comm-us", 100, "--gemm-us", 120, "--json").stdout)
    assert found["duration_us"] == found["serial_us"] == 1760
    assert found["waterfall"]["dependency_waste_us"] == 700
    text = run("simulate", factorized, "--comm-us", 100, "--gemm-us", 120).stdout
    assert text.startswith("ag_gemm   1,760.0 us predicted   efficiency 0.00")
    assert text.count("worker[") == 4


def test_simulate_says_of_a_racy_program_that_it_has_a_race():
    racy, asked = run("emit", "--fork", "none").stdout, ("simulate", "-", "--comm-us", 100, "--gemm-us", 120)
    assert "warning: ag_gemm has a race: " in run(*asked, given=racy).stdout.splitlines()[1]
    assert json.loads(run(*asked, "--json", given=racy).stdout)["fault"].startswith("ag_gemm has a race: ")
    assert "warning" not in run(*asked, given=run("emit").stdout).stdout


@pytest.mark.parametrize(
    ("arguments", "given", "expected"),
    [
        (("emit", "--tiles", "0"), None, "tiles must be at least 1"),
        (("emit", "--tiles", "many"), None, "not a valid integer"),
        (("emit", "--order", "developed", "--fork", "hoisted"), None, "give it or --fork and --join"),
        (("emit", "--order", "sideways"), None, "sideways"),
        (("lint",), None, "Missing argument 'PROGRAM...'"),
        (("lint", "/nonexistent"), None, "cannot read /nonexistent: No such file"),
        (("lint", "/"), None, "cannot read /: Is a directory"),
        (("lint", "-"), "nonsense", "stdin:1: a program begins with"),
        (("lint", "-"), 'program("x")\nwait(', "stdin:2: "),
        (("simulate", "-", "--comm-us", "1", "--gemm-us", "nan"), "ok", "gemm_us must be a time"),
        (("simulate", "-", "--comm-us", "1", "--gemm-us", "1", "--queues", "0"), "ok", "queues must be"),
        (("simulate", "-", "--comm-us", "1", "--gemm-us", "1", "--rank", "9"), "ok", "rank 9"),
        (("nothing",), None, "nothing is not a command; commands: compare, emit"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(arguments, given, expected):
    text = format_program(emit_named("developed")) if given == "ok" else given
    result = run(*arguments, given=text)
    assert result.exit_code == 2
    assert expected in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_file_that_is_not_text_is_one_line(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    assert run("lint", path).stderr == f"error: {path} is not text\n"


def test_help_lists_the_commands_that_run_programs_without_loading_torch():
    code = """
import sys
from click.testing import CliRunner
from aorta.programs import bounds, cli, show, simulator
from aorta.programs.language import emit, graph, ir, text
from aorta.programs.lint import one_rank, ranks
result = CliRunner().invoke(cli.main, ["--help"])
program = CliRunner().invoke(cli.main, ["emit"]).stdout
assert CliRunner().invoke(cli.main, ["lint", "-"], input=program).exit_code == 0
print("compare" in result.stdout, "run" in result.stdout, "torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "True True False\n"
