"""Columns of a table in the words that people use, and rows that nobody can read."""

import csv
import itertools
import sys
from pathlib import Path

import pytest

from aorta.errors import ConfigError
from aorta.hardware.part import load_hardware
from aorta.projection.memory import memory
from aorta.projection.model import load_model
from tests.larger_data import FOLDER, needs_data
from tests.projection.asked import flags

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.published import (
    precision_dtype,
    published_plan,
    read_published,
    recomputation,
    release_of,
    sharding_kind,
    stack_of_row,
    task_kind,
    whole_number,
)


@pytest.mark.parametrize(
    ("dtype", "texts"),
    [
        ("bf16", "bf16|BF16|bfloat16|fp16|float16|bf16-mixed|16-mixed|half|amp||-|n/a"),
        ("fp8", "fp8|FP8|FP8-CS|fp8-ds|FP8_SC|fp8_e4m3|float8|MXFP8|FP8-MX|fp8 blockwise|hybrid fp8|fp8?"),
        (
            "fp4",
            "nvfp4|NVFP4|mxfp4|fp4|NV FP4|nvfp4?|fp8|nvfp4 (confirm)".replace("fp8|nvfp4 ", "fp8/nvfp4 "),
        ),
    ],
)
def test_precisions(dtype, texts):
    for text in texts.split("|"):
        assert precision_dtype(text) == dtype, text


@pytest.mark.parametrize("text", ["tf32", "fp32", "int8"])
def test_a_precision_that_is_not_modelled_is_refused(text):
    with pytest.raises(ConfigError, match="not modelled"):
        precision_dtype(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("none", None, ())),
        ("No", ("none", None, ())),
        ("0", ("none", None, ())),
        ("full", ("full", None, ())),
        ("yes", ("full", None, ())),
        ("1", ("full", None, ())),
        ("full (uniform, 1)", ("full", None, ())),
        ("Selective", ("selective", None, ())),
        ("selective op", ("selective", None, ())),
        ("32 of 61", ("full", 32, ())),
        ("full, 21 layers", ("full", 21, ())),
        ("block 4", ("full", 32, ())),  # of each of 8 chunks
        ("200 layers", ("full", 61, ())),
        ("mla_up_proj, mlp", ("none", None, ("latent_up", "ffn"))),
        ("selective (core_attn)", ("selective", None, ())),
        ("selective: layernorm; moe_act", ("none", None, ("norm", "activation"))),
    ],
)
def test_recomputation(text, expected):
    assert recomputation(text, load_model("deepseek-v3"), 8) == expected


def test_recomputation_that_nobody_understands_is_refused():
    with pytest.raises(ConfigError, match="'sometimes' is not understood"):
        recomputation("sometimes", load_model("llama3-8b"), 1)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("FSDP2", "fsdp2"), ("fsdp", "fsdp"), ("FSDP1", "fsdp"), ("HSDP (8)", "hsdp"), ("ZeRO-3", "zero3"),
        ("zero_1", "zero1"), ("distributed optimizer", "zero1"), ("dist-opt", "zero1"), ("DDP", "ddp"),
        ("megatron-fsdp", "zero3"), ("", "zero1"), ("none", "zero1"),
    ],
)  # fmt: skip
def test_shardings(text, kind):
    assert sharding_kind(text) == kind


def test_numbers_and_tasks():
    assert whole_number({"seq": "8,192"}, "seq") == whole_number({"seq": "8k"}, "seq") == 8192
    assert whole_number({"seq": "-"}, "seq", 3) == 3
    assert task_kind("LoRA") == task_kind("peft") == "lora"
    assert task_kind("SFT") == task_kind("") == "pretrain"


BAD = {
    "gpu": ("TPU v5p", "", "H100 PCIe"),
    "model": ("t5-11b", "", "no/such-70b"),
    "n_gpus": ("", "0", "x", "1e400", "7"),
    "precision": ("tf32", "int8"),
    "seq": ("", "nan", "-1"),
    "mbs": ("0", "1.5", "many"),
    "gbs": ("-2", "3", "inf"),
    "tp": ("3", "16", "x"),
    "pp": ("7", "500"),
    "ep": ("1000",),
    "shard": ("sometimes",),
    "recompute": ("sometimes",),
    "tok_s_gpu": ("", "nan", "inf", "-5", "fast"),
}
GOOD = {
    "id": "r", "gpu": "H100 SXM", "n_gpus": "64", "task": "", "model": "Mixtral 8x7B", "precision": "FP8-CS",
    "seq": "4k", "mbs": "1", "gbs": "256", "tp": "2", "pp": "4", "vpp": "2", "cp": "1", "ep": "8",
    "shard": "distributed optimizer", "recompute": "none", "compile": "", "framework": "unheard-of",
    "tok_s_gpu": "4,321", "complete": "", "source": "",
}  # fmt: skip


@pytest.mark.heavy
def test_each_row_that_cannot_be_read_is_left_out_with_a_reason(tmp_path):
    """One wrong column each, every pair of neighbouring ones, and the good row beside them."""
    wrong = [(name, text) for name, texts in BAD.items() for text in texts]
    rows = [GOOD | {name: text, "id": f"{name}={text}"} for name, text in wrong]
    rows += [GOOD | dict(pair) | {"id": "two"} for pair in itertools.pairwise(wrong)]
    path = tmp_path / "measured_throughput_bad.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(GOOD))
        writer.writeheader()
        writer.writerows([GOOD, *rows])
    good, left_out = read_published(path)
    assert [row.name for row in good] == ["r"]
    assert len(left_out) == len(rows)
    assert all(row.reason and "\n" not in row.reason for row in left_out)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("performance_summary.html (NeMo 25.02)", "25.02"),
        ("docs/performance-summary-archive.md 26.04", "26.04"),
        ("docs/performance-summary-archive.md 26.04.01", "26.04.01"),
        ("dgxc-benchmarking v25.05.5 nemotron/README.md.", "25.05.05"),
        ("driver 580.26.04, 26.04.01.2", None),
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
@needs_data()
def test_no_row_in_view_that_ran_is_refused_for_its_memory():
    for name in ("measured_throughput.csv", "measured_throughput_2026-11.csv"):
        for row in read_published(FOLDER / "public" / name)[0]:
            capacity = row.hardware.memory.hbm_bytes
            assert any(memory(row.model, plan, capacity).fits for _, plan in row.plans), row.name


@needs_data()
def test_a_published_row_and_its_flags_agree():
    """e70-gb200-mx from the table and from options, to the last digit."""
    with (FOLDER / "public" / "measured_throughput_2026-11.csv").open(encoding="utf-8") as file:
        line = next(row for row in csv.DictReader(file) if row["id"] == "e70-gb200-mx")
    model, hardware = load_model(line["model"]), load_hardware("gb200")
    _, plan, _ = flags(
        "--model", line["model"], "--gpu-arch", "gb200", "--nodes", 1, "--gpus-per-node", 64, "--tp", 2,
        "--pp", 4, "--vpp", 5, "--global-batch-size", 256, "--seq-len", 8192, "--dtype", "fp8",
        "--stack", "megatron-bridge@26.04", "--fp8-scaling", "mx",
    )  # fmt: skip
    assert plan == published_plan(line, hardware, model)
