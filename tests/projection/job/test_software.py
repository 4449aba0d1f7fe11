import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from aorta.errors import ConfigError
from aorta.hardware import load_hardware
from aorta.projection.cli import main
from aorta.projection.job.model import load_model
from aorta.projection.job.software import job_facts, load_stack, release_of, settings_of, stack_of_row, stacks
from aorta.projection.memory import memory
from aorta.projection.options import read
from aorta.projection.validation.published import published_plan, read_published

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "public"
measured = pytest.mark.skipif(not DATA.is_dir(), reason="measured data are not here (../shared/data)")


def flags(*arguments):
    """What the command line reads from options."""
    command = main.commands["memory"]
    context = command.make_context("memory", [str(argument) for argument in arguments])
    return read(context.params)


@pytest.mark.parametrize("name", [name for name in stacks() if name != "any"])
def test_every_rule_of_every_stack_can_be_met(name):
    """Conditions ask for known facts, and settings are those of a plan."""
    facts = job_facts(load_model("deepseek-v3"), load_hardware("h100"), {"tp": 8, "pp": 4, "ep": 8, "cp": 2})
    for version in ("22.01", "24.01", "25.04", "26.04"):
        settings_of(
            load_stack(f"{name}@{version}") if not stacks()[name].row_source else load_stack(name), facts
        )


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("performance_summary.html (NeMo 25.02)", "25.02"),
        ("docs/performance-summary-archive.md 26.04", "26.04"),
        ("mlcommons/training_results_v5.1 Cisco", "25.10"),
        ("benchmarks/llama3_h100_202412_torchtitan.md", "24.12"),
        ("arXiv 2205.05198 table 5", "22.05"),
        ("README.md A100 80GB, 1600 Gbps", None),
    ],
)
def test_releases_are_read_from_sources(text, release):
    assert release_of(text) == release


def test_the_source_tells_recipes_of_one_framework_apart():
    assert stack_of_row("nemo", "mlcommons/training_results_v5.0 NVIDIA").stack.name == "nemo-mlperf"
    assert stack_of_row("nemo", "NeMo 25.02").stack.name == "nemo"
    assert stack_of_row("my-own-loop", "") is None


def test_an_unknown_stack_names_the_near_one():
    with pytest.raises(ConfigError, match="did you mean 'nemo'"):
        load_stack("nemoo")
    with pytest.raises(ConfigError, match="year.month"):
        load_stack("nemo@latest")


ROW = {
    "gpu": "H100", "n_gpus": "512", "model": "llama3-405b", "precision": "fp8", "seq": "8192", "mbs": "1",
    "gbs": "252", "tp": "8", "pp": "8", "vpp": "7", "cp": "2", "ep": "1", "shard": "distopt",
    "recompute": "none", "framework": "nemo", "source": "NeMo 25.02", "complete": "yes",
}  # fmt: skip


def test_flags_and_rows_give_one_plan():
    """The same job from a table and from the command line."""
    model, hardware = load_model("llama3-405b"), load_hardware("h100")
    row = published_plan(ROW | {"gbs": "256"}, hardware, model)
    _, plan, _ = flags(
        "--model", "llama3-405b", "--gpu-arch", "h100", "--nodes", 64, "--tp", 8, "--pp", 8,
        "--vpp", 7, "--cp", 2, "--global-batch-size", 256, "--seq-len", 8192, "--dtype", "fp8",
        "--stack", "nemo@25.02",
    )  # fmt: skip
    assert plan == row
    assert plan.tp_overlap
    assert plan.grad_bytes == 2


def test_hybrid_sharding_is_not_full_sharding():
    model, hardware = load_model("llama2-7b"), load_hardware("h100")
    line = {**ROW, "model": "llama2-7b", "n_gpus": "96", "tp": "1", "pp": "1", "vpp": "1", "cp": "1",
            "gbs": "192", "mbs": "2", "shard": "hsdp", "framework": "fms-fsdp",
            "precision": "bf16"}  # fmt: skip
    plan = published_plan(line, hardware, model)
    assert plan.replicas == 12
    assert plan.shard_ranks == 8


def test_what_a_row_says_in_words_is_a_setting():
    model, hardware = load_model("llama3-405b"), load_hardware("h100")
    plan = published_plan({**ROW, "gbs": "256", "quality": "no TP overlap in this recipe"}, hardware, model)
    assert not plan.tp_overlap


@pytest.mark.heavy
@measured
def test_no_row_that_ran_is_refused_for_its_memory():
    for path in DATA.glob("measured_throughput*.csv"):
        for row in read_published(path)[0]:
            capacity = row.hardware.memory.hbm_bytes
            assert any(memory(row.model, plan, capacity).fits for _, plan in row.plans), row.name


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--model", "llama3-70b", "--sharding", "ddp"], id="70b-copied"),
        pytest.param(["--model", "llama3-8b", "--sharding", "ddp", "--seq-len", 65536], id="8b-64k"),
        pytest.param(["--model", "llama3-405b", "--nodes", 2, "--sharding", "fsdp"], id="405b-on-16"),
        pytest.param(["--model", "mixtral-8x22b", "--ep", 8], id="8x22b-on-8"),
        pytest.param(
            ["--model", "llama3-8b", "--micro-batch-size", 16, "--stack", "torchtitan", "--sharding", "fsdp"],
            id="16-sequences",
        ),
    ],
)
def test_what_cannot_run_is_refused(arguments):
    model, plan, hardware = flags(*arguments, "--gpu-arch", "h100")
    assert memory(model, plan, hardware.memory.hbm_bytes).verdict == "does not fit"


@measured
def test_a_published_row_and_its_flags_agree():
    """e70-gb200-mx from the table and from options, to the last digit."""
    with (DATA / "measured_throughput_2026-11.csv").open(encoding="utf-8") as file:
        line = next(row for row in csv.DictReader(file) if row["id"] == "e70-gb200-mx")
    model, hardware = load_model(line["model"]), load_hardware("gb200")
    _, plan, _ = flags(
        "--model", line["model"], "--gpu-arch", "gb200", "--nodes", 1, "--gpus-per-node", 64, "--tp", 2,
        "--pp", 4, "--vpp", 5, "--global-batch-size", 256, "--seq-len", 8192, "--dtype", "fp8",
        "--stack", "megatron-bridge@26.04", "--fp8-scaling", "mx",
    )  # fmt: skip
    assert plan == published_plan(line, hardware, model)


def test_intervals_widen_with_what_was_never_measured():
    def width(*arguments):
        result = CliRunner().invoke(
            main, ["performance", "--model", "llama3-8b", "--global-batch-size", "64", *arguments, "--json"]
        )
        found = json.loads(result.stdout)
        low, high = found["interval"]["step_ms"]
        return high / low, {one["reason"] for one in found["widened_by"] if not one["measured"]}

    known, nothing = width("--gpu-arch", "h100", "--stack", "nemo@25.04")
    other, never = width("--gpu-arch", "h20", "--stack", "colossalai@25.04")
    assert not nothing
    assert never == {"no step was measured on h20", "no step of colossalai was measured"}
    assert other > known


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        pytest.param("qwen3-30b-a3b", 1.45, id="narrow"),
        pytest.param("deepseek-v3", 1.0, id="wide-experts-hide-the-conversions"),
    ],
)
def test_experts_in_mxfp8_are_slow_where_they_are_narrow(model, factor):
    plan = {"tp": 1, "pp": 4, "ep": 8, "dtype": "fp8", "fp8_scaling": "mx"}
    facts = job_facts(load_model(model), load_hardware("gb200"), plan)
    assert settings_of(load_stack("megatron-bridge@26.02"), facts)["expert_factor"] == factor
