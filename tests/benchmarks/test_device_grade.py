"""The grade of scripts/amd_check.sh's file finds what is not as promised, and only that."""

import sys
from pathlib import Path

import msgspec
import pytest

from aorta.errors import ConfigError

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from device_grade import RULES, DeviceCheck, Fact, Part, exit_code, grade, grade_lines, read_check

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


GOOD: dict[str, dict[str, Fact]] = {
    "doctor": {"num_failed": 0, "has_tracer": True},
    "records": {
        "exit_status": 0, "share_of_kernels": 1.0, "share_seen": 1.0, "num_lost": 0, "num_dropped": 0,
        "num_no_time": 0, "num_late": 0, "num_calls_without_kernel": 0, "num_kernels_without_call": 0,
    },
    "events": {"exit_status": 0, "share_of_events": 1.0},
    "truth": {"kernels_beyond": 0.0, "compute_error": 0.004},
    "harmless": {"again": True, "native": True},
    "cost": {"low": 0.995},
    "queues": {"num_unlike": 0},
    "launcher": {"exit_status": 0, "share_of_ranks": 1.0},
    "capture": {"exit_status": 0, "share_merged": 1.0},
}  # fmt: skip


def check(parts: dict[str, Part]) -> DeviceCheck:
    return DeviceCheck(
        device_check=1, aorta="1", torch="2.11", runtime="hip 7.0", devices=["AMD Instinct MI300X"] * 2,
        num_ranks=2, seconds=400.0, parts=parts,
    )  # fmt: skip


def parts(**changed: dict[str, Fact]) -> dict[str, Part]:
    return {name: Part(seconds=1.0, facts=facts | changed.get(name, {})) for name, facts in GOOD.items()}


def test_what_is_as_promised_passes_line_by_line() -> None:
    assert {line.verdict for line in grade(check(parts()))} == {"pass"}


def test_every_part_has_a_line() -> None:
    assert {rule.part for rule in RULES} == set(GOOD)


@pytest.mark.parametrize(
    ("part", "fact", "planted", "promise"),
    [
        ("records", "num_lost", 3, "records that found no room in the ring"),
        ("records", "share_of_kernels", 0.5, "steps that kernel records time"),
        ("harmless", "native", False, "and with the instrument"),
        ("truth", "compute_error", 0.2, "compute a step, beside torch.profiler"),
        ("cost", "low", 1.04, "step time with over without, low end"),
        ("queues", "num_unlike", 1, "hardware queues are as many as set"),
        ("launcher", "exit_status", 1, "the launch script trains on every GPU"),
    ],
)
def test_a_planted_failure_is_the_one_line_that_fails(
    part: str, fact: str, planted: Fact, promise: str
) -> None:
    failed = [line for line in grade(check(parts(**{part: {fact: planted}}))) if line.verdict == "fail"]
    assert [line.rule.promise for line in failed] == [promise]


def test_a_part_that_could_not_run_is_no_failure_and_one_that_lacks_its_number_is() -> None:
    absent = parts() | {"capture": Part(seconds=0.0, facts={}, reason="rocprofv3 is not on PATH")}
    absent["cost"] = Part(seconds=9.0, facts={"ratio": 1.0})
    unknown = parts(doctor={"has_tracer": None})
    assert [(g.rule.part, g.found) for g in grade(check(absent)) if g.verdict == "not run"] == [
        ("capture", "rocprofv3 is not on PATH")
    ] * 2
    assert [g.rule.part for g in grade(check(absent)) if g.verdict == "fail"] == ["cost"]
    assert [g.rule.fact for g in grade(check(unknown)) if g.verdict == "not run"] == ["has_tracer"]


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({}, 0, "23 lines pass, 0 fail"),
        ({"records": {"num_dropped": 7}}, 1, "records that the driver dropped"),
        ({"doctor": {"has_tracer": None}}, 3, "1 did not run"),
    ],
)
def test_a_file_is_graded(
    tmp_path: Path, changed: dict[str, dict[str, Fact]], status: int, said: str
) -> None:
    path = tmp_path / "device_check.json"
    path.write_bytes(msgspec.json.encode(check(parts(**changed))))
    found = read_check(path)
    assert exit_code(found) == status
    assert said in "\n".join(grade_lines(found))


def test_another_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"is no file of scripts/amd_check\.sh"):
        read_check(path)
