import json

import pytest
from click.testing import CliRunner

from aorta.errors import ConfigError
from aorta.hardware.part import load_hardware
from aorta.projection.cli import main
from aorta.projection.memory import memory
from aorta.projection.model import load_model
from aorta.projection.software import (
    job_facts,
    load_stack,
    measured_releases,
    release_number,
    settings_of,
    stacks,
)
from tests.projection.asked import flags


@pytest.mark.parametrize("name", [name for name in stacks() if name != "any"])
def test_every_rule_of_every_stack_can_be_met(name):
    """Conditions ask for known facts, and settings are those of a plan."""
    facts = job_facts(load_model("deepseek-v3"), load_hardware("h100"), {"tp": 8, "pp": 4, "ep": 8, "cp": 2})
    for version in ("22.01", "24.01", "25.04", "26.04"):
        settings_of(
            load_stack(f"{name}@{version}") if not stacks()[name].row_source else load_stack(name), facts
        )


def test_an_unknown_stack_names_the_near_one():
    with pytest.raises(ConfigError, match="did you mean 'nemo'"):
        load_stack("nemoo")
    for release in ("latest", "26.13", "26.4", "26.04.01.02"):
        with pytest.raises(ConfigError, match="year.month"):
            load_stack(f"nemo@{release}")


def test_a_patch_lies_between_its_release_and_the_next():
    """Rules that begin with a release hold for its patches, those that end with it do not."""
    facts = job_facts(load_model("qwen3-30b-a3b"), load_hardware("b200"), {"fp8_scaling": "mx"})

    def factor(version):
        return settings_of(load_stack(f"megatron-bridge@{version}"), facts).get("expert_factor")

    assert load_stack("megatron-bridge@26.04.1").label == "megatron-bridge@26.04.01"
    assert factor("26.04.01") == factor("26.04") != factor("26.06.01")
    assert factor("26.06.01") == factor("26.06")


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


def test_a_mixture_like_none_that_was_measured_is_not_known():
    """Its interval is as wide as such models were off, and one measured node would make it narrower."""

    def found(model, gpu):
        job = ["performance", "--model", model, "--gpu-arch", gpu, "--nodes", 8, "--ep", 4]
        job += ["--global-batch-size", 256, "--stack", "megatron-bridge@26.04", "--json"]
        result = json.loads(CliRunner().invoke(main, [str(word) for word in job]).stdout)
        low, high = result["interval"]["step_ms"]
        once_low, once_high = result["with_one_measurement"]["step_ms"]
        unknown = [one["reason"] for one in result["widened_by"] if one["reason"].startswith("not known")]
        assert result["known"] == (not unknown)
        return high / low, once_high / once_low, unknown

    measured, _, nothing = found("qwen3-30b-a3b", "h100")
    new, once, unknown = found("qwen1.5-moe-a2.7b", "h100")
    assert not nothing
    assert new > 1.9 > measured
    assert once < new
    (reason,) = unknown
    assert reason.startswith("not known: no step of qwen1.5-moe-a2.7b was measured (mixture with 60 experts")
    _, _, unknown = found("nemotron-3-nano-30b-a3b", "mi300x")
    assert unknown == ["not known: no step of a hybrid was measured on a part of AMD"]


def test_a_release_a_year_from_all_measured_ones_widens():
    def width(release):
        job = ["performance", "--model", "llama3-8b", "--gpu-arch", "h100", "--tp", 2, "--json"]
        job += ["--global-batch-size", 64, "--stack", f"megatron-lm@{release}"]
        low, high = json.loads(CliRunner().invoke(main, [str(word) for word in job]).stdout)["interval"][
            "step_ms"
        ]
        return high / low

    assert width("26.04") > 1.1 * width("22.05")


def test_a_clock_above_the_sustained_one_is_questioned():
    def reasons(mhz):
        job = [
            "performance",
            "--model",
            "llama3-8b",
            "--gpu-arch",
            "mi300x",
            "--gpu-clock-mhz",
            mhz,
            "--json",
        ]
        found = json.loads(CliRunner().invoke(main, [str(word) for word in job]).stdout)
        return [one for one in found["widened_by"] if "MHz" in one["reason"]]

    assert not reasons(1000)
    (questioned,) = reasons(2100)
    assert questioned["reason"] == "2100 MHz, where mi300x under load sustains 1207"
    assert not questioned["measured"]
    assert questioned["factor"] == pytest.approx(2100 / 1207)


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        pytest.param("qwen3-30b-a3b", 1.5, id="narrow"),
        pytest.param("deepseek-v3", 1.0, id="wide-experts-hide-the-conversions"),
    ],
)
def test_experts_in_mxfp8_are_slow_where_they_are_narrow(model, factor):
    plan = {"tp": 1, "pp": 4, "ep": 8, "dtype": "fp8", "fp8_scaling": "mx"}
    facts = job_facts(load_model(model), load_hardware("gb200"), plan)
    assert settings_of(load_stack("megatron-bridge@26.02"), facts)["expert_factor"] == factor


@pytest.mark.parametrize(
    ("model", "scaling", "overlaps"),
    [
        pytest.param("qwen3-235b-a22b", "mx", True, id="qwen3-235b in MXFP8"),
        pytest.param("qwen3-235b-a22b", "tensor", False, id="qwen3-235b otherwise"),
        pytest.param("kimi-k2", "mx", False, id="kimi-k2"),
    ],
)
def test_experts_overlap_in_an_nvl72_where_recipes_say_so(model, scaling, overlaps):
    layout = {"ep": 32, "pp": 4, "dtype": "fp8", "fp8_scaling": scaling}
    facts = job_facts(load_model(model), load_hardware("gb300"), layout)
    assert settings_of(load_stack("megatron-bridge@26.08"), facts).get("ep_overlap", False) is overlaps
    assert not settings_of(load_stack("megatron-bridge@26.04"), facts).get("ep_overlap", False)


def test_a_setting_that_one_model_told_widens_the_interval_of_others():
    """Nemotron-4 340B told that bf16 on Blackwell is slow before 25.06, gpt-oss 120B how windows run."""

    def told(*arguments):
        job = ("--nodes", 8, "--gpus-per-node", 4, "--global-batch-size", 64, "--json")
        result = CliRunner().invoke(main, [str(one) for one in ("performance", *arguments, *job)])
        reasons = json.loads(result.stdout)["widened_by"]
        return {
            one["reason"]: (round(one["factor"], 2), one["measured"])
            for one in reasons
            if "one model" in one["reason"]
        }

    on_gb200 = ("--gpu-arch", "gb200", "--stack")
    slow = "the software's slowdown rests on one model (nemotron4-340b)"
    dense = ("--model", "llama3-70b", "--tp", 4, *on_gb200)
    assert told(*dense, "nemo@25.05") == {slow: (1.29, False)}  # e to the power of 0.19 over 0.74
    assert told(*dense, "nemo@25.07") == {}
    assert told("--model", "nemotron4-340b", "--tp", 4, "--pp", 8, *on_gb200, "nemo@25.05") == {
        slow: (1.0, True)
    }
    windows = "the software's attention rests on one model (gpt-oss-120b)"
    sinks = ("--model", "gpt-oss-20b", "--ep", 8, *on_gb200, "megatron-bridge@26.04")
    assert set(told(*sinks)) == {windows}
    assert told(*sinks, "--attention", "cudnn") == {}


@pytest.mark.parametrize(
    ("model", "gpu", "factors"),
    [
        # what the recipes and the notes of releases 0.5 to 0.6 name: fused on GB200 from 26.06, on B300 a
        # patch later, and for gpt-oss slow again in between
        pytest.param(
            "gpt-oss-120b", "gb200", {"26.06": 0.75, "26.06.01": 1.5, "26.08": 0.75}, id="regressed"
        ),
        pytest.param("deepseek-v3", "b300", {"26.06": 1.0, "26.06.01": 0.75}, id="a-patch-later"),
        pytest.param("deepseek-v3", "gb200", {"26.04": 1.0, "26.06": 0.75}, id="first"),
    ],
)
def test_fused_experts_come_and_go_with_releases(model, gpu, factors):
    facts = job_facts(load_model(model), load_hardware(gpu), {"dtype": "fp8", "fp8_scaling": "mx", "ep": 64})
    found = {
        version: settings_of(load_stack(f"megatron-bridge@{version}"), facts)["expert_factor"]
        for version in factors
    }
    assert found == factors


def test_nano_recomputes_its_experts_on_hopper_alone():
    """Its recipe for H100 in FP8 recomputes whole layers of experts, those for Blackwell nothing."""

    def recomputed(gpu):
        facts = job_facts(load_model("nemotron-3-nano-30b-a3b"), load_hardware(gpu), {"dtype": "fp8"})
        return settings_of(load_stack("megatron-bridge@26.04"), facts).get("recompute_modules", [])

    assert "experts" in recomputed("h100")
    assert recomputed("gb200") == []


def test_a_release_after_the_last_measured_one_widens():
    """Releases change what the same job takes: 26.08 is the last one with rows."""

    def widened(release):
        job = (
            "--model",
            "llama3-8b",
            "--gpu-arch",
            "h100",
            "--stack",
            f"megatron-bridge@{release}",
            "--json",
        )
        reasons = json.loads(CliRunner().invoke(main, ("performance", *job)).stdout)["widened_by"]
        return [one["reason"] for one in reasons if "after" in one["reason"]]

    assert widened("26.08") == widened("26.06.01") == []
    assert widened("26.10") == ["no step of megatron-bridge after 26.08 was measured"]


def test_releases_are_those_that_stacks_know():
    for name, found in measured_releases().items():
        assert name in stacks()
        for version, rows in found.items():
            assert version == "undated" or release_number(version) == version
            if rows.gain is not None:
                assert rows.jobs > 0
                assert sorted(rows.gain) == list(rows.gain)
