"""Cells of a matrix, recipes, ours and upstream's; what the cells do, and how often they fail."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from aorta.cli import main
from aorta.errors import AortaError
from aorta.sweep import matrix
from aorta.sweep.effects import Noise, common_noise, fisher, results_of, share_interval
from aorta.sweep.metrics import RunMetric, parsed_metric, values_of_run
from aorta.sweep.series import RoundRun, Series, Variant
from aorta.sweep.table import headline, table_lines
from aorta.timeline.statistics import ALPHA

# ---- cells -------------------------------------------------------------------------------------


def cells(*axes, command=("train.py", "--lr={lr}")):
    return matrix.cells_of(axes, command)


def test_cells_are_every_combination_the_last_axis_fastest():
    found = cells(
        matrix.setting_axis("lr", ["1", "2"]),
        matrix.variable_axis("X", [None, "7"]),
        matrix.prefix_axis({"bare": [], "numa": ["numactl", "-N", "0"]}),
    )
    assert [cell.name for cell in found[:3]] == [
        "lr=1, X=(unset), bare",
        "lr=1, X=(unset), numa",
        "lr=1, X=7, bare",
    ]
    assert found[-1] == Variant("lr=2, X=7, numa", ["numactl", "-N", "0", "train.py", "--lr=2"], {"X": "7"})


@pytest.mark.parametrize(
    ("axes", "command", "words"),
    [
        ([], ["x"], "nothing is varied"),
        ([matrix.setting_axis("lr", ["1", "2"])], [], "there is no command"),
        (
            [matrix.variable_axis("X", ["1", "2"]), matrix.environment_axis({"a": {"X": "3"}})],
            ["x"],
            "set twice",
        ),
        ([matrix.setting_axis("n", [str(n) for n in range(2000)])], ["x"], "more than 1000"),
    ],
)
def test_what_is_no_matrix_is_refused(axes, command, words):
    with pytest.raises(AortaError, match=words):
        matrix.cells_of(axes, command)


def test_the_baseline_comes_first():
    found = cells(matrix.setting_axis("lr", ["1", "2"]))
    assert matrix.with_baseline_first(found, "lr=2")[0].name == "lr=2"
    with pytest.raises(AortaError, match="did you mean 'lr=2'"):
        matrix.with_baseline_first(found, "lr=2x")


@pytest.mark.parametrize("name", ["fsdp_prefetch", "hw_queues_rocm", "nccl_channels"])
def test_recipes_that_come_with_aorta_load(name):
    recipe, notes = matrix.load_recipe(f"config/sweeps/{name}.yaml")
    assert matrix.cells_of(matrix.axes_of(recipe), ["x"])
    assert not notes


def recipe_of(folder: Path, text: str):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return matrix.load_recipe(path)


def test_a_recipe_of_upstream_by_its_axes(tmp_path):
    """Its cells are called mitigation-diagnostic, 1.15 is 15 % slower, and what is not done is said."""
    recipe, notes = recipe_of(
        tmp_path,
        "schema_version: 1\nmode: probe\nticket: T-1\ntrials: 2\ntimeout_per_trial: 60\n"
        "mitigation_axis: [none, hsa_no_sdma]\ndiagnostic_axis: [none, hip_launch_blocking]\n"
        "step_time_regex: 'step ([0-9.]+)'\ncollect_paths: [out.log]\n"
        "confound: {threshold: 1.15, baseline_cell: none-none}\n",
    )
    found = matrix.with_baseline_first(matrix.cells_of(matrix.axes_of(recipe), ["x"]), recipe.baseline)
    assert [cell.name for cell in found] == [
        "none-none", "none-hip_launch_blocking", "hsa_no_sdma-none", "hsa_no_sdma-hip_launch_blocking",
    ]  # fmt: skip
    assert found[-1].environment == {"HSA_ENABLE_SDMA": "0", "HIP_LAUNCH_BLOCKING": "1"}
    assert (recipe.trials, recipe.timeout_s, recipe.slower_by) == (2, 60, 15)
    assert matrix.metrics_of(recipe.metrics)[0] == RunMetric("step_time", line="step ([0-9.]+)")
    assert notes == ["aorta collects no files: each run's folder has its output (collect_paths)"]


def test_a_recipe_of_upstream_by_its_cells(tmp_path):
    recipe, _ = recipe_of(
        tmp_path,
        "schema_version: 1\ntrials: 3\ncells:\n"
        "- {name: base, mitigations: [none], environment: local}\n"
        "- {name: fast, mitigations: [tf32_off], extra_env: {NCCL_PROTO: Simple}}\n",
    )
    found = matrix.cells_of(matrix.axes_of(recipe), ["x"])
    assert [(cell.name, cell.environment) for cell in found] == [
        ("base", {}), ("fast", {"DISABLE_TF32": "1", "NCCL_PROTO": "Simple"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("setings: {a: [1]}\n", "did you mean 'settings'"),
        ("schema_version: 2\n", "schema_version"),
        ("schema_version: 1\nworkload: race\n", "give the command behind --"),
        ("schema_version: 1\nmitigation_axis: [tf32_of]\n", "did you mean 'tf32_off'"),
        ("schema_version: 1\ncells: [{name: a, environment: rocm7}]\n", "give its words with --prefix"),
        ("trials: 0\n", "trials"),
        ("fails_if: '('\n", "no regular expression"),
        ("schema_version: 1\nconfound: {threshold: high}\n", "threshold"),
        ("schema_version: 1\ncells: [3]\n", "cells"),
        ("schema_version: 1\nmitigation_axis: 3\n", "mitigation_axis"),
        ("- 1\n", "must hold"),
    ],
)
def test_what_is_no_recipe_is_one_line(tmp_path, text, words):
    with pytest.raises(AortaError, match=words):
        recipe_of(tmp_path, text)


# ---- numbers of a run --------------------------------------------------------------------------


def test_a_metric_is_a_line_of_the_output_or_a_value_of_a_file(tmp_path):
    log = tmp_path / "log"
    log.write_text("loss 3.5\nloss 2.5\ntokens nan\n")
    (tmp_path / "out.json").write_text(json.dumps({"final": [{"accuracy": 0.5}]}))
    texts = [
        r"loss=loss ([\d.]+)",
        "accuracy=@out.json:final.0.accuracy",
        "tokens=tokens (.*)",
        "absent=x(y)",
    ]
    metrics = [parsed_metric(text) for text in texts]
    values, missing = values_of_run(metrics, tmp_path, log, tmp_path, 0.0, 1.25)
    assert values == {"wall_s": 1.25, "loss": 2.5, "accuracy": 0.5, "tokens": None, "absent": None}
    assert missing == "tokens: it is nan"
    later = (tmp_path / "out.json").stat().st_mtime + 60
    assert "older than the run" in values_of_run(metrics[1:2], tmp_path, log, tmp_path, later, 1.0)[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepms", "did you mean 'step_ms'"),
        ("a=(", "no regular expression"),
        ("a=b", "one group"),
        ("a=@f", "needs a key"),
    ],
)
def test_what_is_no_metric_is_refused(text, words):
    with pytest.raises(AortaError, match=words):
        parsed_metric(text)


# ---- what cells do -----------------------------------------------------------------------------


def series_of(values, names=None, metrics=("wall_s",), matters=0.03):
    """values: [cell][round], None for a run that failed."""
    variants = [Variant(name, [name]) for name in names or "abcdefgh"[: len(values)]]
    series = Series("sweep", variants, len(values[0]), matters, 1, [RunMetric(m) for m in metrics])
    for number in range(len(values[0])):
        for variant, row in zip(variants, values, strict=True):
            value = row[number]
            series.runs.append(
                RoundRun(number, variant.name, 0, int(value is None), {m: value for m in metrics},
                         "it broke" if value is None else "", value is None)
            )  # fmt: skip
    return series


def test_common_noise_by_hand():
    """Two cells, two rounds, 0 0 / 0 2: what is beside cells and rounds is +-0.5 in each, 1 in all, of 1."""
    assert common_noise(np.array([[0.0, 0.0], [0.0, 2.0]])) == (pytest.approx(1.0), 1)


def test_an_interval_of_two_cells_is_students():
    from scipy.special import stdtrit

    logs = np.array([[0.0, 0.0, 0.0], [0.01, 0.02, 0.03]])
    half = stdtrit(2, 0.975) * 0.01 / math.sqrt(3)
    assert Noise.of(logs).interval(logs[1], 0.05) == pytest.approx((0.02 - half, 0.02 + half))


@pytest.mark.heavy
@pytest.mark.parametrize("spreads", [[0.02] * 6, [0.02] * 5 + [0.08], [0.08] + [0.02] * 5])
def test_matrices_without_a_difference_are_called_as_seldom_as_stated(spreads):
    """400 matrices of 6 cells x 3 trials, one cell or the baseline four times as noisy: 5 % and 3 errors."""
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(400):
        logs = rng.standard_normal((6, 3)) * np.array(spreads)[:, None] + 0.05 * rng.standard_normal(3)
        noise = Noise.of(logs)
        found = [noise.interval(row - logs[0], ALPHA / 5) for row in logs[1:]]
        wrong += any(low > 0 or high < 0 for low, high in found)
    assert wrong / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_a_slower_cell_is_told_and_a_like_one_is_the_same():
    rng = np.random.default_rng(0)
    noise = np.exp(0.003 * rng.standard_normal((3, 5)))
    results = results_of(series_of((noise * np.array([[1.0], [1.0], [1.1]])).tolist()))
    assert [result.effects[0].verdict for result in results] == ["not judged", "same", "slower"]
    low, high = results[2].effects[0].interval
    assert low < 1.1 < high


def test_one_trial_tells_nothing():
    effect = results_of(series_of([[1.0], [2.0]]))[1].effects[0]
    assert (effect.verdict, effect.reason, effect.interval) == (
        "cannot tell",
        "one round tells no scatter",
        None,
    )


def test_values_of_zero_are_not_judged():
    effect = results_of(series_of([[1.0, 1.0], [0.0, 1.0]]))[1].effects[0]
    assert (effect.verdict, effect.reason) == (
        "not judged",
        "some values are 0 or less: a ratio tells nothing",
    )


def test_fisher_and_the_share_by_hand():
    """3 of 3 against 0 of 3: 2 of the 20 ways. 0 of 3: 1 - 0.025^(1/3) = 0.7076 (Clopper and Pearson)."""
    assert fisher(3, 3, 0, 3) == pytest.approx(2 / 20)
    assert share_interval(0, 3) == (0.0, pytest.approx(1 - 0.025 ** (1 / 3)))
    assert share_interval(3, 3) == (pytest.approx(0.025 ** (1 / 3)), 1.0)


def test_a_cell_that_fails_more_often_is_told_with_its_first_line():
    results = results_of(series_of([[1.0] * 8, [None] * 8]))
    rate = results[1].failures
    assert (rate.num_failed, rate.verdict, rate.first_line) == (8, "fails more often", "it broke")
    assert "fails more often" in headline(series_of([[1.0] * 8, [None] * 8]), results)


def test_it_no_longer_fails_because_it_is_slower_is_said():
    base = [1.0, 1.01, 0.99, 1.0, None, None, None, None]
    slow = [1.5, 1.52, 1.49, 1.5, 1.51, 1.5, 1.5, 1.5]
    assert "may be hidden, not cured" in results_of(series_of([base, slow]))[1].notes[0]
    same = [1.0, 1.0, 1.0, 1.01, 1.0, 1.0, 1.0, 1.0]
    assert results_of(series_of([base, same]))[1].notes == [
        "0 of 8 failed against 4 of 8, and it is not slower"
    ]
    broken = [None] * 8
    assert "cannot be told" in results_of(series_of([broken, slow]))[1].notes[0]
    assert "is not slower" in results_of(series_of([base, slow]), slower_by=1.0)[1].notes[0]


# ---- the command -------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_matrix_of_2_by_3_by_3_goes_on_and_answers(tmp_path, monkeypatch):
    """B=1, C=2 fails always; nothing runs twice when the same command comes again."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.sh"
    program.write_text(
        'echo x >> count\necho "value $((100 + B))"\n'
        '[ "$B$C" = 12 ] && { echo "Error: no"; exit 1; }\nexit 0\n'
    )
    arguments = [
        "sweep",
        "--env",
        "B=0,1",
        "--env",
        "C=0,1,2",
        "--metric",
        "value=value (.*)",
        "-o",
        "out",
        "--",
    ]
    done = CliRunner().invoke(main, [*arguments, "sh", str(program)])
    assert done.exit_code == 1, "all runs of a cell fail"
    assert "B=1, C=2: first failure: exit status 1: Error: no" in done.stdout
    assert "same within 3 % +1.0 %" in done.stdout
    assert len((tmp_path / "count").read_text().split()) == 18
    again = CliRunner().invoke(main, [*arguments, "sh", str(program)])
    assert again.stdout == done.stdout
    assert len((tmp_path / "count").read_text().split()) == 18
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [cell["failures"]["num_failed"] for cell in found] == [0, 0, 0, 0, 0, 3]


def test_cells_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        main, ["sweep", "--bundle", "none", "--bundle", "two:X=1,Y=2", "--list", "--", "true"]
    )
    assert done.stdout == "none: true\ntwo: X=1 Y=2 true\n2 cells x 3 trials\n"
    assert list(tmp_path.iterdir()) == []


def test_the_table_says_how_many_runs_are_done():
    series = series_of([[1.0, 1.0], [1.0, 1.0]])
    series.runs.pop()
    assert table_lines(series, results_of(series))[0].startswith("2 cells x 2 trials, 3 of 4 runs done")
