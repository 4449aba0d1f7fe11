"""Runs in rounds: `aorta ab` stops when two are told apart, a matrix after its trials; both go on."""

import json
import math
import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from aorta.cli import main
from aorta.cli.ab import _variants, answer, where
from aorta.errors import AortaError
from aorta.sweep.metrics import RunMetric
from aorta.sweep.series import (
    RoundRun,
    Series,
    Variant,
    _end_left_behind,
    _note_process,
    first_failing_line,
    run_series,
    shown,
    stored,
)
from aorta.timeline.sequential import FIRST_LOOK, levels_of_looks, look
from tests.records.run_folders import noisy_run

# ---- looks -------------------------------------------------------------------------------------


def test_an_interval_by_hand():
    """3 pairs of +1, +2 and +3 %: t of 2 degrees at the level of the looks, deviation 1 %, over sqrt(3)."""
    from scipy.special import stdtrit

    found = look([0.01, 0.02, 0.03], last=10, matters=0.03, alpha=0.05)
    half = stdtrit(2, 1 - levels_of_looks(10, 0.05)[0] / 2) * 0.01 / math.sqrt(3)
    assert found.interval == pytest.approx((math.exp(0.02 - half), math.exp(0.02 + half)))
    assert found.outcome == "cannot tell"


def test_too_few_pairs_decide_nothing():
    assert look([0.5] * (FIRST_LOOK - 1), 10, 0.03, 0.05).outcome == "cannot tell"
    assert look([], 10, 0.03, 0.05).ratio is None


@pytest.mark.parametrize(
    ("shift", "outcome"), [(0.06, "slower"), (-0.06, "faster"), (0.0, "same"), (0.01, "same")]
)
def test_quiet_pairs_are_decided(shift, outcome):
    noise = 0.004 * np.random.default_rng(0).standard_normal(10)
    assert look((shift + noise).tolist(), 10, 0.03, 0.05).outcome == outcome


def test_one_look_alone_is_at_the_plain_level():
    assert levels_of_looks(FIRST_LOOK, 0.05) == pytest.approx([0.05], abs=0.005)


def test_later_looks_have_a_higher_level():
    levels = levels_of_looks(20, 0.05)
    assert levels == pytest.approx(levels[-1] * np.arange(FIRST_LOOK, 21) / 20)
    assert 0.01 < levels[-1] < 0.05


def outcomes(shift, spread, seed, series=300, last=15):
    """How often each outcome is the first that a series ends with."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(series):
        ratios = (shift + spread * rng.standard_normal(last)).tolist()
        looks = (look(ratios[:num], last, 0.03, 0.05) for num in range(FIRST_LOOK, last + 1))
        found.append(next((one.outcome for one in looks if one.is_decided), "cannot tell"))
    return {name: found.count(name) / series for name in ("slower", "faster", "same", "cannot tell")}


@pytest.mark.heavy
def test_series_are_wrong_as_seldom_as_stated():
    """300 series whose pairs vary by 4 %: 5 % and three standard errors."""
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300)
    none = outcomes(0.0, 0.04, seed=1)
    assert none["slower"] + none["faster"] <= allowed
    assert outcomes(math.log(1.03), 0.04, seed=2)["same"] <= allowed
    assert outcomes(math.log(1.03), 0.01, seed=3)["slower"] > 0.9


@pytest.mark.heavy
def test_as_many_pairs_as_are_named_tell_a_change_in_nine_of_ten_series():
    """Named after 10 pairs whose deviation is 2 % exactly; 300 series, 90 % and three standard errors."""
    pairs = np.random.default_rng(0).standard_normal(10)
    pairs = 0.02 * (pairs - pairs.mean()) / pairs.std(ddof=1)
    needed = look(pairs.tolist(), 10, 0.03, 0.05).pairs_needed
    found = outcomes(math.log(1.03), 0.02, seed=4, last=needed)["slower"]
    assert found == pytest.approx(0.9, abs=3 * math.sqrt(0.9 * 0.1 / 300))


# ---- two variants ------------------------------------------------------------------------------


def test_variants_of_a_setting_a_variable_and_two_commands():
    a, b = _variants(["train.py", "--lr={lr}"], "lr=1,2", None)
    assert (a.command, b.command) == (["train.py", "--lr=1"], ["train.py", "--lr=2"])
    a, b = _variants(["train.py"], "lr=1,2", None)
    assert b.command == ["train.py", "lr=2"]
    a, b = _variants(["train.py"], None, "X=,1")
    assert (a.environment, b.environment) == ({"X": None}, {"X": "1"})
    a, b = _variants(["a.py", "--", "b.py", "-x"], None, None)
    assert (a.command, b.command) == (["a.py"], ["b.py", "-x"])


@pytest.mark.parametrize(
    ("setting", "variable", "words"),
    [
        (None, None, "nothing differs"),
        ("lr", None, "KEY=A,B"),
        (None, "X=1,1", "two or more values that differ"),
        (None, "X=1,2,3", "`aorta sweep` takes more"),
        (None, "X-Y=1,2", "name of an environment variable"),
    ],
)
def test_what_cannot_take_turns_is_refused(setting, variable, words):
    with pytest.raises(AortaError, match=words):
        _variants(["train.py"], setting, variable)


# ---- a series ----------------------------------------------------------------------------------


def script(folder: Path, text: str) -> list[str]:
    path = folder / "program.sh"
    path.write_text(text)
    return ["sh", str(path)]


def wanted(command, most_rounds=3, kind="ab", **environment):
    sides = [Variant("A", command), Variant("B", command, environment=environment)]
    return Series(kind, sides, most_rounds, 0.03, 7, [RunMetric("wall_s")])


def done_run(number, name, value):
    return RoundRun(number, name, 0, 0, {"wall_s": value})


@pytest.mark.processes
def test_a_slower_command_is_found_and_runs_take_turns(tmp_path):
    done = run_series(wanted(script(tmp_path, "sleep ${S:-0.02}"), 8, S="0.4"), tmp_path / "ab", 60, 600)
    assert done.look().outcome == "slower"
    rounds = [[run.variant for run in done.runs if run.round == one] for one in range(len(done.runs) // 2)]
    assert all(sorted(names) == ["A", "B"] for names in rounds)


def test_the_order_within_rounds_is_drawn_and_kept():
    series = wanted(["x"], 40)
    firsts = []
    for number in range(40):
        found, first, place = series.next_run()
        assert (found, place) == (number, 0)
        firsts.append(first.name)
        for name in (first.name, {"A": "B", "B": "A"}[first.name]):
            series.runs.append(done_run(number, name, 1.0))
    assert 10 <= firsts.count("A") <= 30


def test_the_spread_of_runs_by_hand():
    """A at log 0, 0.02, 0.04 and B at 0.1, 0.1, 0.1: squares 0.0008 over 4 degrees of freedom."""
    series = wanted(["x"])
    for number, values in enumerate(zip((0.0, 0.02, 0.04), (0.1, 0.1, 0.1), strict=True)):
        for name, value in zip("AB", values, strict=True):
            series.runs.append(done_run(number, name, math.exp(value)))
    assert series.run_spread() == (pytest.approx(math.sqrt(0.0008 / 4)), 4)


def test_no_percentage_is_named_of_fewer_pairs_than_tell_anything():
    series = wanted(["x"])
    series.runs += [done_run(0, "A", 1.0), done_run(0, "B", 2.0)]
    head = answer(series)[0]
    assert "%" not in head
    assert "3 are the least that tell anything" in head


@pytest.mark.processes
def test_a_series_goes_on_where_it_stopped(tmp_path):
    command = script(tmp_path, "echo x >> count; sleep 0.01")
    command = ["sh", "-c", f"cd {tmp_path} && sh {command[1]}"]
    first = run_series(wanted(command), tmp_path / "ab", 60, budget_s=-1)
    assert first.runs == []
    stop = []

    def interrupt(series, run):
        stop.append(run)
        if len(stop) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_series(wanted(command), tmp_path / "ab", 60, 600, interrupt)
    done = run_series(wanted(command), tmp_path / "ab", 60, 600)
    assert len(done.runs) == len((tmp_path / "count").read_text().split())
    with pytest.raises(AortaError, match="the error rate holds for these"):
        run_series(wanted(command, 5), tmp_path / "ab", 60, 600)
    with pytest.raises(AortaError, match="other commands"):
        run_series(wanted(["true"]), tmp_path / "ab", 60, 600)


@pytest.mark.processes
def test_a_series_goes_on_that_was_interrupted_in_its_first_run(tmp_path):
    command = ["sh", str(tmp_path / "first_waits.sh")]
    script_text = f"[ -e {tmp_path}/go ] || kill -INT {os.getpid()}; sleep 0.1"
    (tmp_path / "first_waits.sh").write_text(script_text)
    with pytest.raises(KeyboardInterrupt):
        run_series(wanted(command), tmp_path / "ab", 60, 600)
    assert json.loads((tmp_path / "ab" / "ab.json").read_text())["runs"] == []
    (tmp_path / "go").touch()
    assert run_series(wanted(command, 3), tmp_path / "ab", 60, 600).is_over


@pytest.mark.processes
def test_a_run_that_a_killed_series_left_behind_is_ended(tmp_path):
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    while os.getpgid(child) != child:  # until it has its own session
        pass
    _note_process(tmp_path, child)
    _end_left_behind(tmp_path)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    _end_left_behind(tmp_path)  # nobody is there


@pytest.mark.processes
def test_a_run_that_fails_is_a_result(tmp_path):
    command = script(tmp_path, 'if [ "$F" ]; then echo hello; echo "RuntimeError: no luck"; exit 3; fi')
    done = run_series(wanted(command, 10, F="1"), tmp_path / "ab", 60, 600)
    failed = done.failed(done.variants[1])
    assert len(failed) == len(done.done(done.variants[1])) == 2, "nothing more is tried"
    assert (failed[0].status, failed[0].failure) == (3, "exit status 3: RuntimeError: no luck")
    assert done.look().outcome == "cannot tell"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("start\nTraceback (most recent call last):\nValueError: x\nKilled\n", "ValueError: x"),
        ("start\nend\n", "end"),
        ('Traceback\n  File "a.py"\n    raise RuntimeError("y")\nRuntimeError: y\n', "RuntimeError: y"),
        ('[rank0]:     raise RuntimeError("y")\n[rank0]: RuntimeError: y\n', "[rank0]: RuntimeError: y"),
    ],
)
def test_the_first_failing_line(tmp_path, text, line):
    (tmp_path / "log").write_text(text)
    assert first_failing_line(tmp_path / "log") == line


def test_the_file_of_a_series_holds_no_secret():
    side = Variant("A", ["train.py", "--token", "hf_abcdefghijkl"], {"HF_TOKEN": "hf_abcdefghijkl"})
    series = Series("ab", [side, Variant("B", ["x"])], 3, 0.03, 7, [RunMetric("wall_s")])
    assert "hf_" not in json.dumps(stored(series)) + shown(side)


@pytest.mark.processes
def test_the_command_answers_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["ab", "-n", "3", "--metric", "wall_s", "--json", "-o", "ab", "--", "true", "--", "false"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["variants"]["B"]["num_failed"] == found["variants"]["B"]["num_runs"] == 2
    result = CliRunner().invoke(main, [arguments[0], *(one for one in arguments[1:] if one != "--json")])
    assert result.stdout.startswith("there is nothing to compare: no run of B ended well")
    assert "B failed in 2 of 2 runs: exit status 1" in result.stdout
    assert CliRunner().invoke(main, [*arguments[:-5], "both", "--", "false", "--", "false"]).exit_code == 2


# ---- what runs of a program differ by, kept ----------------------------------------------------


@pytest.mark.heavy
def test_what_is_found_is_taken_apart(tmp_path):
    """Its parts add up to the change that the pairs tell, by the runs' records."""
    series = wanted(["train.py"])
    series.metrics[0] = RunMetric("step_ms")
    for number in range(3):
        for place, (name, slowdown) in enumerate((("A", 1.0), ("B", 1.1))):
            noisy_run(tmp_path / f"round-{number:03d}-{place:03d}", 20, slowdown=slowdown, seed=number)
            value = {"step_ms": 40.0 * slowdown + 0.01 * number * place}
            series.runs.append(RoundRun(number, name, place, 0, value))
    assert series.look().outcome == "slower"
    lines = where(series, tmp_path)
    (total,) = [line.split() for line in lines if line.startswith("step, the sum")]
    assert total[3:8:2] == ["40.0", "44.0", "+4.01"]
    assert any(line.startswith("compute") for line in lines)
    same = msgspec.structs.replace(series, runs=series.runs[:2])
    assert where(same, tmp_path) == []
