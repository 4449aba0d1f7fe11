"""A measured step as anchor: it is reproduced, its terms carry over, and what differs widens the interval."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import aorta
from aorta.errors import BAD_INPUT
from aorta.projection.anchor import read_measured
from aorta.projection.cli import main
from aorta.records.schema import KernelSums
from tests.projection.asked import answer, refused
from tests.records.plain_records import step
from tests.records.run_folders import run_record, write_run

JOB = [
    "--model",
    "llama3-8b",
    "--gpu-arch",
    "h200",
    "--seq-len",
    "4096",
    "--stack",
    "torchtitan",
    "--sharding",
    "fsdp",
]
ONE_NODE = [*JOB, "--global-batch-size", "32", "--micro-batch-size", "2"]
MODELS = Path(aorta.__file__).parent / "projection" / "models"
ROW = """
model: llama3-8b
gpu_arch: h100
nodes: 8
tp: 2
global_batch_size: 256
seq_len: 8192
dtype: fp8
stack: nemo@25.04
"""


@pytest.fixture
def row(tmp_path):
    path = tmp_path / "row.yaml"
    path.write_text(ROW + "step_ms: 6000\n")
    return path


def test_the_anchors_own_job_takes_what_was_measured(row):
    found = answer("performance", "--job", row, "--measured", row)
    assert found["step_ms"] == pytest.approx(6000)
    assert sum(found["breakdown"].values()) == pytest.approx(6000)
    low, high = found["interval"]["step_ms"]
    plain_low, plain_high = answer("performance", "--job", row)["interval"]["step_ms"]
    assert low < 6000 < high
    assert high / low < plain_high / plain_low


def test_a_rate_says_as_much_as_a_step(row, tmp_path):
    """256 sequences of 8192 tokens on 64 GPUs in 6 s are 5461.33 tokens/s and GPU."""
    path = tmp_path / "rate.yaml"
    path.write_text(ROW + "tokens_per_s_per_gpu: 5461.333333\n")
    assert answer("performance", "--job", row, "--measured", path)["step_ms"] == pytest.approx(6000)


def test_another_layout_keeps_the_ratio_and_is_less_sure(row):
    def step(*further):
        return answer("performance", "--job", row, "tp=4", *further)

    ratio = 6000 / answer("performance", "--job", row)["step_ms"]
    found = step("--measured", row)
    assert found["step_ms"] == pytest.approx(ratio * step()["step_ms"])
    reasons = {one["reason"] for one in found["widened_by"]}
    assert reasons == {"anchored on row.yaml", "another layout than the anchor's"}


@pytest.mark.parametrize("command", ["compare", "sweep", "search", "explain"])
def test_every_command_starts_from_the_anchor(row, command):
    further = {
        "compare": ["tp=1"],
        "sweep": ["tp=2"],
        "search": ["--gpus", 64, "--top", 1],
        "explain": [],
    }[command]
    plain = json.dumps(answer(command, "--job", row, *further))
    anchored = json.dumps(answer(command, "--job", row, "--measured", row, *further))
    assert plain != anchored
    if command != "search":
        assert "6000.0" in anchored or "5999.99" in anchored


def test_search_takes_the_recorded_layout_from_the_job(recorded, tmp_path):
    """The recorded node ran micro-batches of 2: what it took is not held against the search's own layouts."""
    run = recorded()
    job = tmp_path / "job.yaml"
    job.write_text(
        "model: llama3-8b\ngpu_arch: h200\nseq_len: 4096\nstack: torchtitan\nsharding: fsdp\n"
        "micro_batch_size: 2\n"
    )
    asked = ["search", "--job", job, "gpus=16", "global-batch-size=64", "top=6"]
    plain, anchored = (
        {row["layout"]: row["step_ms"] for row in answer(*asked, *further)["best"]}
        for further in ([], ["--measured", run])
    )
    ratios = [step / plain[layout] for layout, step in anchored.items() if layout in plain]
    assert len(ratios) > 3
    assert all(ratio == pytest.approx(1, abs=0.02) for ratio in ratios)


@pytest.fixture
def recorded(tmp_path):
    """One node's run, as records with kernel classes, of a stack whose GEMMs take half as long again."""

    def write(*changes):
        found = answer("performance", *ONE_NODE, *changes)
        ms = found["breakdown"]
        classes = {
            "gemm": (ms["gemm_ms"], 100),
            "attention": (ms["attention_ms"], 10),
            "elementwise": (ms["elementwise_ms"] + ms.get("fsdp_copy_ms", 0.0), 100),
        }
        exposed_ms = sum(value for name, value in ms.items() if name.startswith("exposed_"))
        measured = {
            "source": "kernels",
            "world_size": 8,
            "tokens": 32 // 8 * 4096,
            "step_ms": found["step_ms"],
            "overlap": msgspec.structs.replace(step().overlap, exposed_ms=exposed_ms, idle_ms=0.0),
            "kernels": KernelSums(num_kernels=210, classes=classes, top=[]),
        }
        steps = [step(number, rank=rank, **measured) for rank in range(8) for number in range(4)]
        return write_run(tmp_path / "run", steps, run_record(8, devices=[{"name": "NVIDIA H200"}] * 8))

    return write


def test_terms_of_a_recorded_node_carry_over_to_64_gpus(recorded):
    """The recorded stack has slower GEMMs; with these told apart, 64 GPUs take what such a stack takes."""
    slow = ["--set", "factors.gemm=x1.5"]
    run = recorded(*slow)
    larger = [*JOB, "--nodes", "8", "--global-batch-size", "256", "--micro-batch-size", "2"]
    truth = answer("performance", *larger, *slow)
    found = answer("performance", *larger, "--measured", run, "--measured-as", "global-batch-size=32")
    assert found["step_ms"] == pytest.approx(truth["step_ms"], rel=0.01)
    assert found["breakdown"]["gemm_ms"] == pytest.approx(truth["breakdown"]["gemm_ms"], rel=0.01)
    assert found["breakdown"]["attention_ms"] == pytest.approx(truth["breakdown"]["attention_ms"], rel=0.02)


def test_a_record_with_fewer_layers_tells_the_software_of_the_whole_model(recorded, tmp_path):
    """Four layers of the model fit where 32 do not: their terms are those of the same software."""
    slow, four = ["--set", "factors.gemm=x1.5"], tmp_path / "four_layers.yaml"
    four.write_text((MODELS / "llama3-8b.yaml").read_text().replace("num_layers: 32", "num_layers: 4"))
    run = recorded(*slow, "--model", str(four))
    truth = answer("performance", *ONE_NODE, *slow)
    found = answer("performance", *ONE_NODE, "--measured", run, "--measured-as", f"model={four}")
    assert found["step_ms"] == pytest.approx(truth["step_ms"], rel=0.02)
    assert found["breakdown"]["gemm_ms"] == pytest.approx(truth["breakdown"]["gemm_ms"], rel=0.01)
    assert any("the anchor trained llama3-8b" in one["reason"] for one in found["widened_by"])


def test_the_batch_of_a_recorded_run_follows_from_its_tokens(recorded):
    run = recorded()
    larger = [*JOB, "--nodes", "8", "--global-batch-size", "256", "--micro-batch-size", "2"]
    named = answer("performance", *larger, "--measured", run, "--measured-as", "global-batch-size=32")
    assert answer("performance", *larger, "--measured", run) == named


def test_a_swept_setting_is_not_taken_for_the_recorded_one(recorded):
    """The record is of micro-batches of 2, whatever is swept or compared."""
    run = recorded()
    job = [*ONE_NODE, "--measured", run]
    plain = {
        row["micro-batch-size"]: row for row in answer("sweep", *ONE_NODE, "micro-batch-size=1,4")["rows"]
    }
    for row in answer("sweep", *job, "micro-batch-size=1,4")["rows"]:
        usual = plain[row["micro-batch-size"]]["step_ms"]
        assert row["step_ms"] == pytest.approx(usual, rel=0.02)
    compared = answer("compare", *job, "micro-batch-size=4")["step_ms"]
    assert compared[1] == pytest.approx(plain[4]["step_ms"], rel=0.02)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        pytest.param(ROW, [], "needs one of step_ms and tokens_per_s_per_gpu", id="nothing-measured"),
        pytest.param(ROW + "step_ms: -1", [], "step_ms must be a number above 0", id="negative"),
        pytest.param(ROW + "step_ms: 1", [], "took 1.0 ms where", id="other-work"),
        pytest.param(ROW + "step_ms: 700", [], "% of the fp8 peak of h100", id="above-the-peak"),
        pytest.param(ROW + "step_ms: 6000", ["tp=3"], "--measured-as KEY=VALUE says", id="no-layout"),
        pytest.param("- 1", [], "must be a run's folder, or a job file", id="list"),
    ],
)
def test_what_is_no_anchor_is_one_line(row, tmp_path, text, arguments, message):
    path = tmp_path / "other.yaml"
    path.write_text(text + "\n")
    as_words = [word for text in arguments for word in ("--measured-as", text)]
    assert message in refused("performance", "--job", row, "--measured", path, *as_words)


def test_a_run_on_no_gpu_is_no_anchor_unless_a_part_is_named(recorded):
    """A step on a CPU that happens to take as long says nothing about a GPU."""
    run = recorded()
    document = json.loads((run / "run.json").read_text())
    document["devices"] = [{"name": "some processor"}]
    (run / "run.json").write_text(json.dumps(document))
    line = refused("performance", *ONE_NODE, "--measured", run)
    assert "ran on some processor, which has no hardware file; --measured-as gpu_arch=NAME" in line
    named = answer("performance", *ONE_NODE, "--measured", run, "--measured-as", "gpu_arch=h200")
    assert named["step_ms"] > 0


def test_a_folder_without_a_run_is_one_line(row, tmp_path):
    assert "has no run.json" in refused("performance", "--job", row, "--measured", tmp_path)
    result = CliRunner().invoke(main, ["performance", "--job", str(row), "--measured-as", "tp=1"])
    assert result.exit_code == BAD_INPUT


def test_a_record_written_again_is_read_again(recorded):
    """A sweep reads a record once; who records into the same folder again gets the new step."""
    run = recorded()
    (first, again) = (read_measured(run) for _ in range(2))
    assert first is again
    shutil.rmtree(run)
    assert recorded("factors.gemm=x2") == run
    assert read_measured(run).step_s > 1.2 * first.step_s
