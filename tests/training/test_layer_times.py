"""The writer of the projection's benchmark mode, on the CPU."""

import json
import time

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from aorta.errors import ConfigError
from aorta.hardware.names import PARTS_DIR
from aorta.projection.benchmarked import read_measurements, shape_of
from aorta.projection.cli import main as projection
from aorta.projection.model import load_model
from aorta.training.layer_times import LayerWork, layer_config, main, time_unit
from tests.dist.launch import run_command

SMALL = """
name: small
source: "made up"
hidden: 64
num_layers: 3
num_heads: 4
num_kv_heads: 2
ffn: 96
vocab_size: 128
"""
EXPERTS = "experts: {num_experts: 4, num_active: 2, ffn: 96}\n"


def layer_times(arguments):
    main(arguments)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def layers(model_file):
    """Measured once on the CPU, under the name of a hardware file."""
    path = model_file.parent / "layers.json"
    arguments = [
        "--model",
        model_file,
        "--seq-len",
        32,
        "--repeats",
        3,
        "--device",
        "cpu",
        "--gpu-arch",
        "h200",
    ]
    done = CliRunner().invoke(main, [str(part) for part in (*arguments, "--output", path)])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"wrote {path}"
    return path


@pytest.mark.heavy
def test_every_kind_of_layer_is_timed_both_ways(layers, model_file):
    found = read_measurements(layers)
    assert [unit.unit for unit in found.units] == ["embedding", "dense", "output"]
    for unit in found.units:
        assert 0 < unit.forward_ms <= unit.forward_p90_ms
        assert 0 < unit.backward_ms <= unit.backward_p90_ms
        assert (unit.micro_batch_size, unit.seq_len, unit.tp, unit.num_repeats) == (1, 32, 1, 3)
    assert found.model == shape_of(load_model(str(model_file)))
    assert found.stack == "eager"
    assert "cpu" in found.source


def test_the_projection_composes_measured_layers(layers, model_file):
    """Three measured layers, embedding and output; one rank exchanges nothing and the host costs nothing."""
    plan = ["--model", str(model_file), "--gpu-arch", "h200", "--seq-len", "32", "--gpus-per-node", "1"]
    plan += ["--stack", "eager", "--sharding", "ddp", "--measurements", str(layers), "--json"]
    done = CliRunner().invoke(projection, ["performance", *plan, "--profiling-mode", "both"])
    assert done.exit_code == 0, done.output
    both = json.loads(done.stdout)
    units = {unit.unit: unit.forward_ms + unit.backward_ms for unit in read_measurements(layers).units}
    expected_ms = 3 * units["dense"] + units["embedding"] + units["output"]
    breakdown = both["benchmark"]["breakdown"]
    beside = breakdown["optimizer_ms"] + breakdown["host_ms"]
    assert both["benchmark"]["step_ms"] - beside == pytest.approx(expected_ms, rel=1e-6)
    assert both["simulate"]["step_ms"] != both["benchmark"]["step_ms"]


def test_layers_of_another_model_or_device_are_refused(layers, tmp_path, model_file):
    common = [
        "performance",
        "--seq-len",
        "32",
        "--profiling-mode",
        "benchmark",
        "--measurements",
        str(layers),
    ]
    other = CliRunner().invoke(projection, [*common, "--model", "llama3-8b", "--gpu-arch", "h200"])
    assert other.exit_code == 2
    assert "other sizes than those of llama3-8b" in other.stderr
    moved = tmp_path / "mine.yaml"
    moved.write_text((PARTS_DIR / "h100.yaml").read_text().replace("name: h100", "name: mine"))
    other = CliRunner().invoke(projection, [*common, "--model", str(model_file), "--gpu-arch", str(moved)])
    assert other.exit_code == 2
    assert "measured on h200, not on mine" in other.stderr


def test_a_file_that_is_there_is_left_alone(layers, model_file):
    before = layers.read_bytes()
    done = CliRunner().invoke(main, ["--model", str(model_file), "--output", str(layers)])
    assert done.exit_code == 2
    assert done.stderr.strip() == f"error: --output {layers} already exists; name another file"
    assert layers.read_bytes() == before


def test_two_ranks_time_their_exchange_of_tokens(tmp_path):
    """On gloo; the experts of a layer lie on both."""
    model = tmp_path / "mixture.yaml"
    model.write_text(SMALL + EXPERTS)
    path = tmp_path / "layers.json"
    arguments = ["--model", model, "--seq-len", 32, "--repeats", 2, "--warmup", 1, "--ep", 2]
    arguments += ["--gpu-arch", "h200", "--output", path]
    exit_codes, _, errors = run_command(layer_times, [str(part) for part in arguments], 2)
    assert exit_codes == [0, 0], errors
    assert [(unit.unit, unit.ep) for unit in read_measurements(path).units][1] == ("moe", 2)


def test_forward_and_backward_are_told_apart():
    """A layer whose forward pass sleeps, and one whose backward pass does."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, there, back):
            ctx.back = back
            time.sleep(there)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(ctx.back)
            return grad, None, None

    weight = nn.Parameter(torch.ones(2))
    for there, back in ((0.1, 0.0), (0.0, 0.1)):
        work = LayerWork(
            "dense", lambda there=there, back=back: (Sleep.apply(weight, there, back),), (), (weight,)
        )
        times = time_unit(work, torch.device("cpu"), 1, 3)
        slow, quick = (
            (times.forward_ms, times.backward_ms) if there else (times.backward_ms, times.forward_ms)
        )
        assert len(slow) == len(quick) == 3
        assert min(slow) >= 100 > min(quick)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("deepseek-v3", "no latent attention", id="latent"),
        pytest.param("qwen3-30b-a3b", "heads of hidden / num_heads", id="head-dim"),
    ],
)
def test_models_that_cannot_be_built_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        layer_config(load_model(name), micro_batch_size=1, seq_len=128)


def test_too_few_ranks_say_how_to_start_more(model_file, tmp_path):
    done = CliRunner().invoke(
        main, ["--model", str(model_file), "--tp", "2", "--output", str(tmp_path / "x")]
    )
    assert done.exit_code == 2
    assert "start with torchrun --nproc_per_node 2" in done.stderr
