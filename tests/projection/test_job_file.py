"""A job from a file, from options and from KEY=VALUE arguments is one job, in every command."""

import pytest
from click.testing import CliRunner

from aorta.projection.cli import main
from tests.projection.asked import answer, refused

JOB = """
model: llama3-8b
gpu-arch: h100
nodes: 2
dp: 16
global_batch_size: 64
dtype: fp8
recompute_modules: [norm, activation]
enable_deepep: null
sequence_parallel: false
"""
OPTIONS = [
    "--model", "llama3-8b", "--gpu-arch", "h100", "--nodes", "2", "--global-batch-size", "64",
    "--dtype", "fp8", "--recompute-modules", "norm,activation", "--no-sequence-parallel",
]  # fmt: skip


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.mark.parametrize("command", ["performance", "memory"])
def test_a_file_and_options_give_one_job(job, command):
    assert answer(command, "--job", job) == answer(command, *OPTIONS)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(["tp=2", "factors.gemm=x1.1"], id="key-value"),
        pytest.param(["--tp", 2, "--set", "factors.gemm=x1.1"], id="options"),
        pytest.param(["--tp", 8, "tp=2", "factors.gemm=x1.1"], id="the-last-one-counts"),
    ],
)
def test_the_command_line_goes_before_the_file(job, changes):
    """The file's dp is void where an axis changes, as it is the rest of the GPUs."""
    given = [*OPTIONS, "--tp", 2, "--set", "factors.gemm=x1.1"]
    assert answer("performance", "--job", job, *changes) == answer("performance", *given)


def test_what_ifs_stand_in_the_file(job):
    job.write_text(JOB + "set: {factors.gemm: x1.1}\n")
    set_in_file = answer("performance", "--job", job)
    assert set_in_file == answer("performance", *OPTIONS, "--set", "factors.gemm=x1.1")
    both = answer("performance", "--job", job, "hardware.memory.sustained_hbm_bytes_per_s=x2")
    assert both["step_ms"] < set_in_file["step_ms"]


def test_flags_are_written_as_yes_and_no(job):
    on = answer("performance", "--job", job, "tp=2", "sequence-parallel=yes")
    assert on == answer("performance", *OPTIONS, "--tp", 2, "--sequence-parallel")


@pytest.mark.heavy
def test_search_takes_the_gpus_of_a_job(job):
    found = answer("search", "--job", job, "top=3")
    assert len(found["best"]) == 3
    assert found["gpu"] == "h100"


@pytest.mark.heavy
def test_search_takes_a_model_that_the_file_leaves_out(job):
    job.write_text("".join(line for line in JOB.splitlines(keepends=True) if "model" not in line))
    assert answer("search", "--job", job, "--model", "llama3-8b", "top=1")["model"] == "llama3-8b"


def test_compare_and_sweep_start_from_the_file(job):
    compared = answer("compare", "--job", job, "tp=2")
    assert compared["step_ms"][0] == answer("performance", "--job", job)["step_ms"]
    swept = answer("sweep", "--job", job, "tp=2", "pp=1,2")
    assert swept["rows"][0]["step_ms"] == compared["step_ms"][1]


@pytest.mark.parametrize("command", ["performance", "memory", "explain", "search", "compare", "sweep"])
def test_a_misspelt_key_names_the_near_one(job, command):
    job.write_text(JOB + "nods: 3\n")
    axis = ["tp=1,2"] if command in ("compare", "sweep") else []
    line = refused(command, "--job", job, *axis)
    assert line == f"error: {job}: nods is not a setting of a job, did you mean 'nodes'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("tp: x", "tp: 'x' is not a valid integer", id="no-number"),
        pytest.param("tp: 2.5", "tp: '2.5' is not a valid integer", id="half-a-rank"),
        pytest.param("nodes: yes", "nodes: 'yes' is not a valid integer", id="yes"),
        pytest.param("dtype: fp9", "dtype: 'fp9' is not one of", id="no-choice"),
        pytest.param("tp: {a: 1}", "tp must be one value", id="mapping"),
        pytest.param("set: [1]", "set must hold KEY: VALUE", id="set-of-a-list"),
        pytest.param("- model", "must hold options of a job", id="list"),
    ],
)
def test_what_a_file_cannot_hold_is_one_line(job, text, message):
    job.write_text(text + "\n")
    assert f"{job}: {message}" in refused("performance", "--job", job)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        pytest.param("tpp=2", "did you mean 'tp'", id="unknown"),
        pytest.param("tp", "write KEY=VALUE", id="no-value"),
        pytest.param("tp=x", "'x' is not a valid integer", id="no-number"),
        pytest.param("tp-overlap=perhaps", "not a valid boolean", id="no-flag"),
    ],
)
def test_mistakes_in_arguments_are_one_line(job, argument, message):
    assert message in refused("performance", "--job", job, argument)


@pytest.mark.heavy
def test_search_takes_the_what_ifs_and_the_stack_of_a_job(job):
    plain = answer("search", "--job", job, "top=1", "stack=nemo@25.04")
    job.write_text(JOB + "stack: nemo@25.04\nset: {factors.gemm: x1.1}\n")
    found = answer("search", "--job", job, "top=1")
    assert found["stack"] == "nemo@25.04"
    assert found["best"][0]["step_ms"] > plain["best"][0]["step_ms"]


def test_help_fits_a_screen_and_all_options_are_one_flag_away():
    short, long = (
        CliRunner().invoke(main, ["performance", flag]).stdout.splitlines()
        for flag in ("--help", "--help-all")
    )
    assert len(short) <= 40
    assert "--job FILE" in "".join(short)
    assert len(long) > 70
    assert any("--adapter-rank" in line for line in long)
