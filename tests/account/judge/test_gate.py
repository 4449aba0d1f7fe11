"""Limits on metrics: met, violated, or not to be judged."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from aorta.account.judge.gate import Limit, check_budget, junit_xml, load_budget, markdown
from aorta.errors import AortaError, ConfigError
from aorta.page.write import Outputs, make_report, write_report
from tests.dist.launch import run_python
from tests.records.run_folders import noisy_run, run_record, step_record, step_timeline, write_run

SCRIPT = Path(__file__).parents[3] / "analysis" / "overlap_report.py"


def run_of(folder, num_steps=20, **step):
    """Every step alike: step 10, compute 8, comm 4.5, hidden 3.5, exposed 1, idle 1 ms."""
    records = [step_record(step_timeline(step=i, **step), 1) for i in range(num_steps)]
    return write_run(folder, records, run_record(1))


def budget(tmp_path, text):
    path = tmp_path / "budget.yaml"
    path.write_text(text)
    return path


def checked(tmp_path, text, *folders):
    report = make_report(folders, [chr(ord("a") + i) for i in range(len(folders))])
    return check_budget(load_budget(budget(tmp_path, text)), report)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("exposed_ms: {max: 1.5}", "met"),
        ("exposed_ms: {max: 1.0}", "met"),
        ("exposed_ms: {max: 0.9}", "violated"),
        ("overlap_ratio: {min: 0.7}", "met"),
        ("overlap_ratio: {min: 0.8}", "violated"),
        ("step_ms: {min: 9, max: 11}", "met"),
        ("comm_ms.all_gather: {max: 2.9}", "violated"),
        ("exposed_copy_ms: {max: 1}", "not judged"),
        ("comm_ms.broadcast: {max: 1}", "not judged"),
        ("exposed_ms: {max: 0.9}\nexposed_copy_ms: {max: 1}", "violated"),
        ("exposed_ms: {max: 1.5}\nexposed_copy_ms: {max: 1}", "not judged"),
        ("step_ms: {max: 1e1}", "met"),
    ],
)
def test_absolute_limits(tmp_path, text, state):
    gate = checked(tmp_path, text, run_of(tmp_path / "run"))
    assert gate.state == state
    assert gate.exit_status == {"met": 0, "violated": 1, "not judged": 3}[state]


@pytest.mark.heavy
def test_a_ratio_of_single_runs_allows_for_what_runs_differ_by(tmp_path):
    """+0.5 %: the interval reaches about 2.8 % beyond that on either side."""
    folders = noisy_run(tmp_path / "a", 40), noisy_run(tmp_path / "b", 40, slowdown=1.005, seed=1)
    for text, state in (("1.0", "not judged"), ("1.05", "met"), ("0.97", "violated")):
        gate = checked(tmp_path, f"step_ms: {{max_ratio: {text}}}", *folders)
        assert gate.state == state, text
        assert gate.exit_status == {"met": 0, "violated": 1, "not judged": 3}[state]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("exposed_ms: {max_ratio: 1.6}", "met"),
        ("exposed_ms: {max_ratio: 1.02}", "violated"),
        ("step_ms: {max_ratio: 1.05}", "met"),
        ("overlap_ratio: {min_ratio: 0.99}", "violated"),
        ("exposed_copy_ms: {max_ratio: 1.02}", "not judged"),
    ],
)
def test_limits_against_the_reference(tmp_path, text, state):
    """Exposed 1 and 1.5 ms, step 10 and 10.5 ms."""
    gate = checked(tmp_path, text, run_of(tmp_path / "a"), run_of(tmp_path / "b", exposed=1.5))
    assert gate.state == state
    assert {one.label for one in gate.checked} == {"b"}


@pytest.mark.heavy
def test_absolute_limits_are_the_candidates(tmp_path):
    gate = checked(
        tmp_path, "exposed_ms: {max: 1.2}", run_of(tmp_path / "a", exposed=9), run_of(tmp_path / "b")
    )
    assert gate.state == "met"


@pytest.mark.heavy
def test_noise_around_the_limit_cannot_be_judged(tmp_path):
    run = noisy_run(tmp_path / "run", 30)
    median = make_report([run], ["a"]).datasets["a"].statistics["exposed_ms"].median
    gate = checked(tmp_path, f"exposed_ms: {{max: {median}}}", run)
    assert gate.exit_status == 3
    assert gate.checked[0].reason == "too noisy: the interval holds the limit"
    low, high = gate.checked[0].interval.low, gate.checked[0].interval.high
    assert checked(tmp_path, f"exposed_ms: {{max: {high}}}", run).state == "met"
    assert checked(tmp_path, f"exposed_ms: {{max: {low * 0.999}}}", run).state == "violated"


def test_few_steps_cannot_be_judged(tmp_path):
    gate = checked(tmp_path, "exposed_ms: {max: 99}", run_of(tmp_path / "run", num_steps=5))
    assert gate.state == "not judged"
    assert "too few steps" in gate.checked[0].reason


def test_what_is_not_met_is_listed(tmp_path):
    gate = checked(tmp_path, "exposed_ms: {max: 0.9}\nstep_ms: {max: 12}", run_of(tmp_path / "run"))
    assert gate.text.splitlines() == [
        "budget violated: 1 of 2 limits met, 1 violated",
        "violated: a: exposed_ms max 0.9: 1.000 ms [1.000, 1.000]",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold limits such as"),
        ("[]", "must hold limits such as"),
        ("42", "must hold limits such as"),
        ("exposed_ms: 12", r"exposed_ms needs limits such as \{max: 12.0\}, got 12"),
        ("exposed_ms: {}", "exposed_ms needs limits"),
        ("exposed_ms: {maximum: 12}", "exposed_ms.maximum is not a limit, did you mean 'max'"),
        ("exposed_ms: {max_rato: 1.2}", "did you mean 'max_ratio'"),
        ("exposed_ms: {max: fast}", "exposed_ms.max must be a number, got 'fast'"),
        ("exposed_ms: {max: true}", "must be a number, got True"),
        ("exposed_ms: {max: .nan}", "must be a number, got nan"),
        ("exposed_ms: {max: .inf}", "must be a number, got inf"),
        ("exposed_ms: {max: null}", "must be a number, got None"),
        ("exposd_ms: {max: 12}", "exposd_ms is not a metric, did you mean 'exposed_ms'"),
        ("nonsense: {max: 12}", "nonsense is not a metric; there is step_ms"),
        ("exposed_ms: {max_ratio: 1.02}", "needs a reference"),
        ("3: {max: 12}", "3 is not a metric"),
        ("exposed_ms: {max: 1\n", "line 2: not valid YAML"),
        ("exposed_ms: {max: 1}\nexposed_ms: {max: 2}", "exposed_ms appears twice"),
        ("a: &x {max: 1}\nb: *x", "aliases are not allowed"),
        ("!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("exposed_ms: !!python/name:os.system {max: 1}", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("exposed_ms: {max: 99999999999999999999999999999999e99999}", "must be a number"),
        ("? [a, b]\n: {max: 1}", "not valid YAML|is not a metric"),
        ("\x00", "not valid YAML"),
    ],
)
def test_a_wrong_budget_is_one_line_and_nothing_is_written(tmp_path, text, words):
    path = budget(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as error:
        write_report([run_of(tmp_path / "run")], ["a"], tmp_path / "out", outputs=Outputs(budget=path))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_bytes(b"\xff\xfe")])
def test_a_budget_that_cannot_be_read_is_one_line(tmp_path, make):
    make(tmp_path / "budget.yaml")
    with pytest.raises(AortaError, match="budget"):
        load_budget(tmp_path / "budget.yaml")


def test_a_budget_without_end_is_refused(tmp_path):
    with pytest.raises(AortaError, match="not a regular file"):
        load_budget("/dev/zero")


def test_junit(tmp_path):
    text = "exposed_ms: {max: 0.9}\nstep_ms: {max: 12}\nexposed_copy_ms: {max: 1}"
    gate = checked(tmp_path, text, run_of(tmp_path / "run"))
    root = ElementTree.fromstring(junit_xml(gate))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("3", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {
        "exposed_ms max 0.9": ["failure"],
        "step_ms max 12": [],
        "exposed_copy_ms max 1": ["error"],
    }


HOSTILE = "<script>alert(1)</script> | `x` [y](http://z) & $1"


@pytest.mark.heavy
def test_names_are_text_in_junit_and_markdown(tmp_path):
    report = make_report([run_of(tmp_path / "a"), run_of(tmp_path / "b")], ["a", HOSTILE.replace("/", "∕")])
    gate = check_budget([Limit("step_ms", "max", 1.0), Limit("comm_ms.\x07\x1b<x>", "max", 1.0)], report)
    names = [case.get("name") for case in ElementTree.fromstring(junit_xml(gate)).iter("testcase")]
    assert names[1] == "comm_ms.\ufffd\ufffd<x> max 1"
    text = markdown(report, gate)
    assert "<script>" not in text
    assert "](http" not in text
    assert "`" not in text
    rows = [line for line in text.splitlines() if "&lt;script" in line and line.startswith("|")]
    assert rows
    assert all(line.count(" | ") in (4, 5) for line in rows)


@pytest.mark.heavy
def test_markdown(tmp_path):
    report = make_report([run_of(tmp_path / "a"), run_of(tmp_path / "b", exposed=1.5)], ["a", "b"])
    gate = check_budget([Limit("exposed_ms", "max_ratio", 1.02)], report)
    lines = markdown(report, gate).splitlines()
    assert lines[0] == "### Budget violated"
    assert lines[4].startswith("| **violated** | b | exposed_ms max_ratio 1.02 | 1.500 |")
    assert any(line.startswith("### b is slower than a: step time +5.0 %") for line in lines)
    assert any("one run on each side" in line for line in lines)


@pytest.mark.heavy
def test_a_limit_can_need_several_runs(tmp_path):
    folders = [run_of(tmp_path / name) for name in ("a", "b", "b2")]
    report = make_report(folders, ["a", "b", "b"])
    path = tmp_path / "budget.yaml"
    path.write_text(
        "runs: 2\nstep_ms: {max_ratio: 1.02}\nexposed_ms: {max: 99, runs: 1}\noverlap_ratio: {min: 0}\n"
    )
    ratio, absolute, other = check_budget(load_budget(path), report).checked
    assert (ratio.state, ratio.reason) == ("not judged", "needs 2 runs: a has 1")
    assert (absolute.state, other.state) == ("met", "met")


@pytest.mark.parametrize("text", ["runs: 2", "runs: two\nstep_ms: {max: 1}", "step_ms: {max: 1, runs: 0}"])
def test_a_faulty_number_of_runs_is_refused(tmp_path, text):
    path = tmp_path / "budget.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="runs must be a whole number|must hold limits"):
        load_budget(path)


# ---- the command -------------------------------------------------------------------------------

FLAGS = ("--no-page", "--no-perfetto", "--no-parquet")


@pytest.mark.parametrize(
    ("text", "status", "line"),
    [
        ("exposed_ms: {max: 1.2}", 0, "budget met: 1 of 1 limits met"),
        ("exposed_ms: {max: 0.9}", 1, "budget violated: 0 of 1 limits met, 1 violated"),
        ("exposed_copy_ms: {max: 1}", 3, "budget not judged: 0 of 1 limits met, 1 not judged"),
        ("exposed_ms: {maxi: 1}", 2, ""),
    ],
)
def test_the_exit_status_says_it(tmp_path, text, status, line):
    run_of(tmp_path / "run")
    budget(tmp_path, text)
    result = run_python(
        SCRIPT, "--log-dir", "run", "--label", "a", "--output", "out", *FLAGS,
        "--budget", "budget.yaml", "--junit", "ci/junit.xml", "--markdown", "ci/summary.md", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == status, result.stderr
    assert result.stdout.splitlines()[:1] == ([line] if line else [])
    assert (tmp_path / "ci" / "junit.xml").exists() == (status != 2)
    assert (tmp_path / "ci" / "summary.md").exists() == (status != 2)
    assert len(result.stderr.splitlines()) == (1 if status == 2 else 0)


def test_junit_needs_a_budget(tmp_path):
    with pytest.raises(AortaError, match="give --budget too"):
        write_report([run_of(tmp_path / "run")], ["a"], tmp_path / "out", outputs=Outputs(junit="x.xml"))
