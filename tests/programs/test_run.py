"""Commands that run programs, as one process."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from aorta.programs.cli import main
from aorta.programs.execute.run import RunResult, refusal
from aorta.programs.language.emit import ORDERS, Shape, emit
from aorta.programs.language.ir import Program
from aorta.programs.language.text import format_program, parse_program
from aorta.programs.lint.one_rank import lint

SIZES = ("--m", "24", "--n", "4", "--k", "8", "--rounds", "8")


def invoked(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, words)
    return found.exit_code, found.output


def written(folder: Path, **given: object) -> str:
    path = folder / "program.txt"
    path.write_text(format_program(emit(Shape(**given))))  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_a_program_runs_and_says_that_it_was_right(tmp_path: Path, op: str):
    code, output = invoked("run", written(tmp_path, op=op, num_ranks=1, num_tiles=4), *SIZES, "--json")
    assert code == 0
    found = msgspec.json.decode(output, type=RunResult)
    assert (found.right, found.ranks, found.rounds, found.device) == (True, 1, 8, "cpu")
    assert found.low_ms <= found.time_ms <= found.high_ms


def test_the_answer_comes_first_in_words(tmp_path: Path):
    code, output = invoked("run", written(tmp_path, num_ranks=1, num_tiles=2, num_streams=2), *SIZES)
    assert code == 0
    assert output.splitlines()[:2] == ["ag_gemm   1 x cpu   3 streams", "the reference's bits on every rank"]


SOUND = [
    {"op": op, "fork": fork, "join": join, "comm": comm, "num_tiles": 6, "num_ranks": 3}
    for op in ("ag_gemm", "gemm_rs", "gemm_ar")
    for fork, join in ORDERS.values()
    for comm in ("collective", *(("ring", "pairwise") if op == "ag_gemm" else ()))
]
CUTS = {
    "fork": ("forked[", "wait(forked"),
    "join": ("joined[", "wait(joined"),
    "wait": ("wait_work(",),
}
"""By kind: beginnings of the lines that a race lacks."""


def racy_programs() -> Iterator[tuple[str, Program]]:
    """Programs without their forks, joins or waits for works, and with fewer slots than streams."""
    for given in SOUND:
        if given["fork"] != given["join"]:
            continue
        for kind, beginnings in CUTS.items():
            lines = format_program(emit(Shape(**given))).splitlines()
            kept = [line for line in lines if not line.strip().startswith(beginnings)]
            yield (
                f"{kind} {given['op']} {given['comm']} {given['fork']}",
                parse_program("\n".join(kept) + "\n"),
            )
    for num_staging in (1, 2, 3):
        shape = Shape(op="gemm_rs", num_tiles=8, num_streams=4, num_staging=num_staging, num_ranks=2)
        yield f"slots {num_staging}", emit(shape)


def test_racy_programs_are_refused_and_sound_ones_accepted() -> None:
    racy = dict(racy_programs())
    assert len(racy) >= 20
    assert len(SOUND) >= 20
    refused = {name: refusal(lint(program)) for name, program in racy.items()}
    assert [name for name, text in refused.items() if text is None or "has a race" not in text] == []
    sound = [emit(Shape(**given)) for given in SOUND]
    assert [text for program in sound if (text := refusal(lint(program))) is not None] == []


def test_a_racy_program_runs_only_on_demand_and_is_never_certified(tmp_path: Path) -> None:
    path = written(tmp_path, num_ranks=1, num_tiles=4, fork="none")
    code, output = invoked("run", path, *SIZES)
    assert (code, output.count("\n")) == (2, 1)
    assert "has a race: " in output
    assert "--unsafe" in output
    code, output = invoked("run", path, *SIZES, "--unsafe")
    assert code == 1
    assert "reference's bits" not in output
    assert re.search(r"^1 race: agreed in \d of 8 rounds, which proves nothing$", output, re.MULTILINE)


def test_a_sound_program_is_certified_with_unsafe_too(tmp_path: Path) -> None:
    code, output = invoked("run", written(tmp_path, num_ranks=1, num_tiles=4), *SIZES, "--unsafe", "--json")
    found = msgspec.json.decode(output, type=RunResult)
    assert (code, found.right, found.races, found.rounds_agreed) == (0, True, 0, None)


@pytest.mark.parametrize(
    ("given", "sizes", "words"),
    [
        ({"num_ranks": 2}, SIZES, "is for 2 ranks, 1 are running"),
        ({"num_ranks": 1, "num_tiles": 5}, SIZES, "24 rows of A cannot be cut into 5 equal pieces"),
        ({"num_ranks": 1, "num_tiles": 4, "num_lanes": 2}, SIZES, "may have one lane"),
        ({"num_ranks": 1}, ("--m", "0", *SIZES[2:]), "m must be at least 1"),
        ({"num_ranks": 1}, ("--m", "24", "--rounds", "8"), "Missing option '--n'"),
    ],
)
def test_what_cannot_run_is_one_line(tmp_path: Path, given, sizes, words):
    code, output = invoked("run", written(tmp_path, **given), *sizes)
    assert code == 2
    assert words in output
    assert output.count("\n") == 1


HEAD = 'program("ag_gemm", ranks=1)\nA = input(2)\nW = input()\nG = allocate(2)\nC = output(2)\n'
USER = 'user("scale", reads=[A[0]], writes=[G[0]])\n'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (USER, "has no communication: there is nothing to overlap"),
        (USER + "all_gather(A[1], out=G[1], lane=comm)\n", "scale is neither communication nor a multiply"),
    ],
)
def test_a_program_with_other_work_is_refused_in_one_line(tmp_path: Path, body: str, words: str) -> None:
    path = tmp_path / "program.txt"
    path.write_text(HEAD + body)
    code, output = invoked("run", str(path), *SIZES)
    assert (code, output.count("\n")) == (2, 1)
    assert words in output


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path):
    code, output = invoked("run", str(tmp_path / "none.txt"), *SIZES)
    assert (code, output) == (2, f"error: cannot read {tmp_path}/none.txt: No such file or directory\n")


@pytest.mark.parametrize("tiles", ["0", "4,x", ""])
def test_lists_of_numbers_are_checked(tiles: str):
    code, output = invoked("compare", "--op", "ag_gemm", *SIZES, "--tiles", tiles)
    assert code == 2
    assert output.startswith("error: Invalid value for '--tiles'")


@pytest.mark.heavy
def test_a_comparison_that_a_cpu_would_take_hours_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aorta.programs.execute.session.local_device", lambda: torch.device("cpu"))
    sizes = ["--m", "4194304", "--n", "8192", "--k", "8192"]
    result = CliRunner().invoke(main, ["compare", "--op", "ag_gemm", *sizes])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "without GPUs one multiply of 4194304 x 8192 x 8192 takes about" in line
