"""Rows that another table may hold: names, parts and layouts of published runs, none of them refused."""

import itertools
import math
import sys
from pathlib import Path

import pytest

from aorta.hardware.names import hardware_names
from aorta.hardware.part import load_hardware
from aorta.projection.model import load_model

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from projection.published import read_published
from projection.validate import judge

FRAMEWORKS = (
    "nemo", "megatron-bridge", "megatron-lm", "nemo-automodel", "torchtitan", "llm-foundry", "fms-fsdp",
    "transformers", "hai-llm", "primus-megatron", "kempnerforge", "amd-nemo/TE", "meta",
    "deepspeed", "unheard-of",
)  # fmt: skip
COLUMNS = [
    "id",
    "gpu",
    "n_gpus",
    "task",
    "model",
    "precision",
    "seq",
    "mbs",
    "gbs",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "shard",
    "recompute",
    "compile",
    "framework",
    "tok_s_gpu",
]
PRECISIONS = {"bf16": ("bf16", "fp16"), "fp8": ("fp8", "fp8-cs", "mxfp8", "fp8 blockwise"), "fp4": ("nvfp4",)}
RECOMPUTED = (
    "", "none", "selective", "full", "8 layers", "mla_up_proj, mlp", "moe_act", "core_attn",
    "layernorm moe_act", "moe",
)  # fmt: skip
NAMES = [
    "Llama-2-70B",
    "llama3.1-405b",
    "Llama-3.3-70B",
    "llama4-scout",
    "qwen2-72b",
    "mixtral-8x22b",
    "Qwen3-235B-A22B",
    "deepseek-v3",
    "nemotron4-340b",
    "nemotronh-56b",
    "gemma2-27b",
    "gemma3-27b",
    "gpt3-175b",
    "mpt-30b",
    "falcon-40b",
    "mistral-7b",
    "grok-1",
    "gpt-oss-120b",
    "phi-4",
    "megatron-22b",
    "kimi-k2",
    "moonlight-16b",
    "llama-65b",
]
LAYOUTS = (  # gpus, tp, pp, chunks, cp, micro-batches
    (8, 1, 1, 1, 1, 4), (8, 2, 1, 1, 2, 1), (64, 2, 4, 2, 1, 8), (64, 1, 1, 1, 1, 2), (512, 4, 8, 1, 2, 16),
)  # fmt: skip


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Rows of every part, each with a third of the names, the other columns in turn."""
    path = tmp_path_factory.mktemp("rows") / "measured_throughput_made_up.csv"
    turns = [
        itertools.cycle(values)
        for values in (FRAMEWORKS, RECOMPUTED, LAYOUTS, ("fsdp", "distopt", "", "ddp"))
    ]
    lines = [",".join(COLUMNS)]
    parts = [part for part in hardware_names() if part != "h100-500w"]
    pairs = itertools.product(enumerate(NAMES), enumerate(parts))
    for name, part in [(name, part) for (i, name), (k, part) in pairs if (i + k) % 3 == 0]:
        framework, recompute, layout, shard = (next(turn) for turn in turns)
        gpus, tp, pp, vpp, cp, micro_batches = layout
        model, peak = load_model(name), load_hardware(part).compute.peak_flops
        tp = tp if model.num_heads % tp == 0 else 1
        dp = gpus // (tp * pp * cp)
        ep = math.gcd(dp, model.experts.num_experts, 8) if model.experts else 1
        dtype = [dtype for dtype in PRECISIONS if dtype in peak][
            len(lines) % len(set(PRECISIONS) & set(peak))
        ]
        precision = PRECISIONS[dtype][len(lines) % len(PRECISIONS[dtype])]
        task = "lora" if len(lines) % 7 == 0 else "pretrain"
        row = (
            f"r{len(lines)}", part, gpus, task, name, precision, 4096, 1, dp * micro_batches, tp, pp, vpp, cp,
            ep,
            shard, f'"{recompute}"', "yes" if len(lines) % 2 else "", framework, 1000,
        )  # fmt: skip
        lines.append(",".join(map(str, row)))
    path.write_text("\n".join(lines) + "\n")
    return judge(*read_published(path))


@pytest.mark.heavy
def test_no_plausible_row_is_refused(table):
    assert not table.left_out
    assert len(table.rows) > 100


@pytest.mark.heavy
def test_every_row_has_a_finite_interval(table):
    for projection in table.projections.values():
        low, high = projection.tokens_interval
        assert 0 < low < projection.tokens_per_s_per_gpu < high < math.inf
