import json
import re
import resource
import subprocess
import sys
import time

import pytest

from aorta.projection.memory import memory
from aorta.projection.prices import Pricer
from tests.projection.asked import answer, run

SMALL = ["--model", "llama3-8b", "--gpu-arch", "h200", "--global-batch-size", "16"]


def test_performance_gives_step_throughput_interval_and_breakdown():
    found = answer("performance", *SMALL)
    assert found["step_ms"] == pytest.approx(sum(found["breakdown"].values()))
    assert found["tokens_per_s_per_gpu"] == pytest.approx(16 * 4096 / 8 / found["step_ms"] * 1e3)
    low, high = found["interval"]["step_ms"]
    assert low < found["step_ms"] < high
    assert found["fits"]


def test_clock_scales_compute_and_not_memory():
    fast, slow = (answer("performance", *SMALL, "--gpu-clock-mhz", mhz)["breakdown"] for mhz in (1400, 700))
    assert slow["gemm_ms"] > 1.5 * fast["gemm_ms"]
    assert slow["optimizer_ms"] == fast["optimizer_ms"]
    assert slow["elementwise_ms"] == pytest.approx(fast["elementwise_ms"], rel=0.01)


def test_memory_parts_add_up():
    found = answer("memory", *SMALL)
    assert found["total_gib"] == pytest.approx(sum(found["parts_gib"].values()))


@pytest.mark.heavy
def test_explain_names_bound_and_source_of_every_operation():
    found = answer("explain", *SMALL, "--dtype", "fp8")
    assert all(row["bound"] and row["source"] for row in found["operations"])
    names = {row["operation"] for row in found["operations"]}
    assert {"qkv", "qkv_dgrad", "qkv_wgrad", "attention", "attention_grad", "ffn_down_to_fp8"} <= names
    saved = {row["term"]: row["saves_ms"] for row in found["ablation"]}
    assert saved["gemm"] > saved["fp8_cast"] > 0


def test_explain_shows_the_scans_of_a_state_space():
    """It ended in a traceback for every model with state spaces."""
    job = ["--model", "mamba2-2.7b", "--gpu-arch", "h100", "--global-batch-size", "8"]
    (scan,) = {row["size"] for row in answer("explain", *job)["operations"] if row["operation"] == "scan"}
    assert scan.endswith("MB")


def test_a_search_without_an_option_that_its_help_calls_required_is_refused():
    given = {"--model": "llama3-8b", "--gpu-arch": "h100", "--gpus": "8", "--global-batch-size": "64"}
    page = " ".join(run("search", "--help").output.split())
    for name in given:
        assert re.search(rf"{name} (?:(?! --).)*\[required\]", page), name
        result = run("search", *(word for pair in given.items() if pair[0] != name for word in pair))
        assert result.exit_code == 2
        assert name in result.stderr


@pytest.mark.heavy
def test_search_ranks_what_fits():
    found = answer(
        "search", "--model", "llama3-8b", "--gpu-arch", "h100", "--gpus", 8, "--global-batch-size", 64
    )
    steps = [row["step_ms"] for row in found["best"]]
    assert steps == sorted(steps)
    assert all(row["memory_gib"] <= 79.19 for row in found["best"])
    sizes = [row["memory_gib"] for row in found["pareto"]]
    assert sizes == sorted(sizes, reverse=True)


def refused(*arguments):
    """The one line of a mistake that the user can fix."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--global-batch-size", 12], "8 would work", id="batch"),
        pytest.param(["--global-batch-size", 0], "must be at least 1, got 0", id="batch-of-none"),
        pytest.param(["--recompute", "²"], "must be none, selective, full", id="recompute-no-digit"),
        pytest.param(["--gpu-clock-mhz", "nan"], "--gpu-clock-mhz must be between", id="clock-nan"),
        pytest.param(["--gpu-clock-mhz", "1e-300"], "--gpu-clock-mhz must be between", id="clock-tiny"),
        pytest.param(["--seq-len", "1" * 31], "got a number of 31 digits", id="seq-len-huge"),
        pytest.param(["--nodes", "9" * 321], "got a number of 321 digits", id="nodes-huge"),
        pytest.param(["--nodes", 10**6, "--gpus-per-node", 10**6], "GPUs", id="gpus-huge"),
        pytest.param(["--micro-batch-size", 10**6, "--seq-len", 10**6], "tokens", id="tokens-huge"),
        pytest.param(["--recompute", "9" * 5000], "must be none, selective, full", id="recompute-huge"),
        pytest.param(["--gpu-arch", "h30"], "did you mean 'h20", id="gpu"),
        pytest.param(["--model", "llama3-9b"], "did you mean 'llama3-8b'", id="model"),
        pytest.param(["--moe-grouped-gemm", "legacy"], "has no effect", id="grouped-gemm-of-dense"),
        pytest.param(["--enable-deepep"], "needs a model with experts", id="deepep-of-dense"),
        pytest.param(["--schedule", "interleaved"], "has no effect without --pp", id="schedule"),
        pytest.param(["--fsdp-overlap", 0.9], "needs --sharding", id="fsdp-overlap"),
        pytest.param(["--recompute", "some"], "must be none, selective, full", id="recompute"),
        pytest.param(["--tp", 3], "must divide", id="tp"),
        pytest.param(["--tpp", 3], "No such option", id="unknown-option"),
        pytest.param(["--recompute-modules", "norm,foo"], "foo is not one of norm", id="recompute-module"),
        pytest.param(["--recompute-modules", "latent_up"], "has no latent attention", id="latent-of-dense"),
        pytest.param(["--ep-overlap"], "--ep-overlap needs --ep", id="ep-overlap-of-dense"),
        pytest.param(["--mtp"], "--mtp has no effect", id="mtp-of-dense"),
        pytest.param(["--dtype", "int8"], "--dtype", id="unknown-choice"),
        pytest.param(["--dtype", "fp4"], "no matrix rate", id="unknown-rate"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(arguments, message):
    assert message in refused("performance", *SMALL, *arguments)


@pytest.mark.parametrize("command", ["performance", "memory", "explain"])
@pytest.mark.parametrize(
    ("pp", "first", "last", "would_work"),
    [
        pytest.param(2, 4, 4, "--last-stage-layers 28 would work", id="layers-left-over"),
        pytest.param(2, 16, 17, "--last-stage-layers 16 would work", id="one-too-many"),
        pytest.param(2, -1, None, "--first-stage-layers must be at least 0, got -1", id="negative"),
        pytest.param(2, 40, None, "--first-stage-layers 31 or fewer would work", id="more-than-there-are"),
        pytest.param(2, None, 32, "--last-stage-layers 31 or fewer would work", id="none-for-the-other"),
        pytest.param(4, 20, 20, "--last-stage-layers 10 or fewer would work", id="none-in-the-middle"),
        pytest.param(4, 40, 5, "--first-stage-layers 25 or fewer would work", id="first-alone-too-many"),
    ],
)
def test_pipeline_ends_leave_the_layers_that_other_stages_hold(command, pp, first, last, would_work):
    ends = {"--first-stage-layers": first, "--last-stage-layers": last}
    given = [part for name, count in ends.items() if count is not None for part in (name, count)]
    assert would_work in refused(command, *SMALL, "--pp", pp, *given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--gpus", 0], "--gpus must be at least 1", id="gpus"),
        pytest.param(["--gpus-per-node", 0], "--gpus-per-node must be at least 1", id="node-of-none"),
        pytest.param(["--gpus-per-node", -8], "--gpus-per-node must be at least 1", id="node-negative"),
        pytest.param(["--global-batch-size", 0], "--global-batch-size must be at least 1", id="batch"),
        pytest.param(["--seq-len", "1" * 31], "got a number of 31 digits", id="seq-len-huge"),
        pytest.param(["--top", 0], "--top must be at least 1, got 0", id="top-none"),
        pytest.param(["--top", -1], "--top must be at least 1, got -1", id="top-negative"),
    ],
)
def test_mistakes_in_a_search_are_one_line(arguments, message):
    usual = ["--model", "llama3-8b", "--gpu-arch", "h100", "--gpus", 8, "--global-batch-size", 64]
    assert message in refused("search", *usual, *arguments)


def test_what_if_of_fsdp_takes_a_single_micro_batch():
    found = answer("explain", *SMALL, "--global-batch-size", 8, "--sharding", "fsdp2", "--fsdp-overlap", 1)
    assert found["breakdown"]["exposed_dp_comm_ms"] == 0


def test_command_is_quick_and_leaves_torch_alone():
    code = (
        "import sys; from aorta.projection.cli import main; "
        f"main({['performance', *SMALL]!r}, standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert min(times) < 1.5  # of the processor: 0.35 s on an idle machine


@pytest.mark.heavy
def test_projection_takes_milliseconds(h200):
    from aorta.projection.model import load_model
    from aorta.projection.plan import Plan
    from aorta.projection.step import project

    model = load_model("llama3-405b")
    plan = Plan(
        nodes=64,
        dp=4,
        tp=8,
        pp=8,
        vpp=8,
        cp=2,
        global_batch_size=1152,
        seq_len=8192,
        dtype="fp8",
        tp_overlap=True,
    )
    best = min(_seconds(lambda: project(model, plan, Pricer(h200, plan))) for _ in range(5))
    assert best < 0.2  # below 0.05 s on an idle machine
    assert memory(model, plan, 141e9).total_bytes > 0


def _seconds(call):
    """Of this process: others may load the machine."""
    start = time.process_time()
    call()
    return time.process_time() - start


def test_the_layout_names_what_was_asked_for():
    result = run(
        "performance", "--model", "deepseek-v3", "--gpu-arch", "h100", "--nodes", 16, "--pp", 8, "--ep", 8,
        "--global-batch-size", 128, "--dtype", "fp8", "--enable-deepep", "--ep-overlap", "--mtp",
        "--recompute-modules", "norm,latent_up", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    layout = json.loads(result.stdout)["layout"]
    assert layout.endswith("fp8 zero1 recompute norm+latent_up megatron deepep ep-overlap mtp")


@pytest.mark.heavy
def test_ablation_has_an_interval_around_each_saving():
    result = run("explain", *SMALL, "--json")
    for row in json.loads(result.stdout)["ablation"]:
        low, high = row["interval_ms"]
        assert low <= row["saves_ms"] <= high
