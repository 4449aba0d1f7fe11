import json

import msgspec
import pytest

from aorta.hardware.names import hardware_names
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.model import load_model
from aorta.projection.plan import Plan
from aorta.projection.prices import factors_of
from aorta.projection.whatif import Job, changed, sweep_values
from tests.projection.asked import answer, run

SMALL = ["--model", "llama3-8b", "--gpu-arch", "h100", "--nodes", "2", "--global-batch-size", "32"]


def job(gpu="h100", **plan):
    model, hardware = load_model("llama3-8b"), load_hardware(gpu)
    settings = {"nodes": 2, "dp": 16, "global_batch_size": 32, **plan}
    return Job(model, Plan(**settings), hardware, factors_of(hardware))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hardware.scale_up.gpu_bytes_per_s=x2", "sustained_gpu_bytes_per_s is what is read"),
        ("hardware.scale_out.nic_bytes_per_s=x2", "sustained_nic_bytes_per_s is what is read"),
        ("hardware.launch.host_gemm_s=x2", "has no effect on this job"),
        ("hardware.memory.speed=x2", "there is no 'speed'"),
        ("hardware.memory=x2", "has parts; name one of"),
        ("plan.sequence_len=9", "there is no 'sequence_len'"),
        ("plan.tp=x1.5", "plan.tp=x1.5"),
        ("factors.gemm", "write hardware|plan"),
        ("gemm=2", "write hardware|plan"),
        ("model.name=x2", "only a number can be scaled"),
        ("factors.gemm=9e99", "out of any range"),
        ("factors.gemm=-1", "must not be negative"),
        ("hardware.memory.sustained_hbm_bytes_per_s=-1", "must not be negative"),
        ("hardware.memory.sustained_hbm_bytes_per_s=0", "a number above 0 would"),
    ],
)
def test_a_change_that_nothing_reads_is_refused(change, message):
    result = run("performance", *SMALL, "--set", change)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert message in line


@pytest.mark.heavy
def test_links_beyond_the_data_sheet_are_a_what_if_like_any():
    before = answer("performance", *SMALL, "--tp", 8)
    change = "hardware.scale_up.sustained_gpu_bytes_per_s=x2"
    after = answer("performance", *SMALL, "--tp", 8, "--set", change)
    assert after["breakdown"]["exposed_tp_comm_ms"] < before["breakdown"]["exposed_tp_comm_ms"]
    assert run("performance", *SMALL, "--set", "hardware.scale_up.gpu_bytes_per_s=/4").exit_code == 2


def test_changes_reach_the_step():
    before = answer("performance", *SMALL)
    after = answer("performance", *SMALL, "--set", "hardware.memory.sustained_hbm_bytes_per_s=x2")
    assert after["breakdown"]["elementwise_ms"] < 0.6 * before["breakdown"]["elementwise_ms"]
    slower = answer("performance", *SMALL, "--set", "plan.slowdown=1.5")
    assert slower["breakdown"]["gemm_ms"] == pytest.approx(1.5 * before["breakdown"]["gemm_ms"])


def numeric_fields(value, path=""):
    """Dotted names of all numbers of a part that say how fast something is, or how long it takes."""
    for name, item in value.items():
        dotted = f"{path}{name}"
        if isinstance(item, dict) and name not in ("sources", "derived", "interval", "memory_interval"):
            yield from numeric_fields(item, f"{dotted}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield dotted, item


SHEET = (
    "memory.hbm_bytes_per_s",
    "scale_up.gpu_bytes_per_s",
    "scale_out.nic_bytes_per_s",
    "compute.clock_hz",
)
"""Of the data sheet: what bounds the sustained rates, and the clock that the peak is stated at."""
FASTER = ("_bytes_per_s", "flops", "clock_hz", "exp_per_cu_clock")
SLOWER = ("_s", "fp8_gemm", "fp4_gemm", "softmax_forward", "softmax_backward")


@pytest.mark.heavy
@pytest.mark.parametrize("gpu", ["h100", "mi300x", "gb200"])
def test_a_step_is_monotone_in_every_number_of_the_hardware(gpu):
    """Twice the rate is never slower and twice the latency never faster, whatever the job."""
    jobs = [
        job(gpu),
        job(gpu, dp=2, tp=4, pp=2, sequence_parallel=True, tp_overlap=True),
        job(gpu, dp=4, cp=4, sharding="fsdp2", stack="eager", attention="flash", seq_len=16384),
    ]
    plain = msgspec.to_builtins(load_hardware(gpu))
    for before in jobs:
        step_s = before.project().step_s
        for dotted, value in numeric_fields(plain):
            rate = dotted.rpartition(".")[2] in ("bf16", "fp32") or dotted.endswith(FASTER)
            if not rate and not dotted.endswith(SLOWER):
                continue
            if dotted in SHEET:
                continue
            copy = json.loads(json.dumps(plain))
            place = copy
            *names, last = dotted.split(".")
            for name in names:
                place = place[name]
            # The limits of links are asserted against the data sheet, so rates go down and latencies up.
            place[last] = value / 2 if rate else value * 2
            after = before._replace(hardware=msgspec.convert(copy, Hardware))
            after = after._replace(factors=factors_of(after.hardware))
            assert after.project().step_s >= step_s * (1 - 1e-9), (gpu, dotted)


@pytest.mark.heavy
def test_weak_scaling_never_rises():
    rates = [row["tokens_per_s_per_gpu"] for row in answer("sweep", *SMALL, "gpus=8..2048")["rows"]]
    assert len(rates) == 9
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]


def test_compare_says_what_the_difference_is_made_of():
    found = answer("compare", *SMALL, "tp=2")
    assert found["breakdown_ms"]["exposed_tp_comm"][0] == 0 < found["breakdown_ms"]["exposed_tp_comm"][1]
    assert sum(b - a for a, b in found["breakdown_ms"].values()) == pytest.approx(
        found["step_ms"][1] - found["step_ms"][0]
    )
    result = run("compare", *SMALL, "tpp=2")
    assert result.exit_code == 2
    assert "write an option" in result.stderr


def test_a_sweep_names_what_cannot_be():
    rows = answer("sweep", *SMALL, "tp=1,2,3")["rows"]
    assert [("reason" in row) for row in rows] == [False, False, True]
    assert run("sweep", *SMALL, "tp=x..y").exit_code == 2
    assert sweep_values("8..40") == [8, 16, 32]


@pytest.mark.parametrize("gpu", hardware_names())
def test_clocks_beyond_the_part_are_refused(gpu):
    boost_mhz = load_hardware(gpu).compute.boost_clock_hz / 1e6
    result = run("performance", "--model", "llama3-8b", "--gpu-arch", gpu, "--gpu-clock-mhz", 2 * boost_mhz)
    assert result.exit_code == 2
    assert "boost clock" in result.stderr


def test_changed_is_the_same_job_without_changes():
    assert changed(job(), ()) == job()
