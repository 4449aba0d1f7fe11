"""Columns of a table in the words that people use, and rows that nobody can read."""

import csv
import itertools

import pytest

from aorta.errors import ConfigError
from aorta.projection.job.model import load_model
from aorta.projection.validation.columns import (
    precision_dtype,
    recomputation,
    sharding_kind,
    task_kind,
    whole_number,
)
from aorta.projection.validation.published import read_published


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
