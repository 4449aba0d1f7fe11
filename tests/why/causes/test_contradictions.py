"""No output of a run contradicts itself: not by its numbers, not in its sentences, and not another output."""

import re
import tarfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aorta.account.cause import Cause
from aorta.account.judge import cells
from aorta.account.judge.contradictions import Limits, in_cells, in_text
from aorta.account.judge.judged import judge
from aorta.account.load.open import load_run
from aorta.page.html import page
from aorta.records.schema import HostUse
from aorta.why.causes import rank as rank_of_causes
from aorta.why.causes.contradictions import Exposures, in_cause, without_contradictions
from aorta.why.causes.finding import CauseFinding
from aorta.why.causes.rank import found_causes
from aorta.why.causes.rules import rules
from aorta.why.causes.text import filled
from tests.larger_data import FOLDER, needs_data
from tests.why.causes.runs import Host, run_of, slow_loader
from tests.why.causes.statements import disagreements, outputs

DATA = Path(__file__).parents[2] / "data"
LIMITS = Limits(step_ms=40.0, longest_ms=90.0, has_groups=True)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("data loading on rank 1: 20.1 ms a step, 50 % [18.0, 22.5] ms; at least 19.9 ms", None),
        ("its thread sleeps 70.0 ms in such a step, the others' 0.00 ms", None),
        ("12 gaps, 80.0 ms each, together 0.960 s: 12 % of the time", None),
        ("the other rank waits 151.7 ms a step for it", "151.7 ms of a step"),
        ("its thread sleeps 100.0 ms in such a step", "the longest step takes 90"),
        ("its thread sleeps 0.100 s in such a step", "the longest step takes 90"),
        ("72.9 ms of a 33.0 ms step", "72.9 ms of a step"),
        ("20.1 ms a step, 50 % [0.00, 993.6] ms", "holds 0"),
        ("20.1 ms a step, 50 % [22.0, 25.0] ms", "outside of its interval"),
        ("a difference of 43,379.6 % could be seen", "43,379.6 % of a whole"),
        ("look at step None", "None"),
        ("a step waits n/a", "n/a"),
        ("fetching takes {part_ms}", "part_ms"),
        ("no communication: one process", "several ranks"),
        ("no communication was recognised between 8 ranks", None),
    ],
)
def test_a_sentence_that_cannot_be_is_found(text, wrong):
    found = list(in_text(text, LIMITS))
    assert found == [] if wrong is None else any(wrong in one for one in found)


def test_what_some_steps_have_may_be_longer_than_the_mean_step():
    told = {
        "in_steps": "4",
        "num_steps": "16",
        "counted": "recorded",
        "part_ms": "48.5 ms",
        "who": "the rank",
    }
    texts = [
        filled(text, told | {"step_ms": "70.0 ms"}) for rule in rules().values() for text in rule.evidence
    ]
    of_some = [text for text in texts if "4 of 16 recorded steps" in text]
    assert len(of_some) >= 4
    assert [wrong for text in of_some for wrong in in_text(text, LIMITS)] == []


@pytest.mark.parametrize(
    ("cells", "wrong"),
    [
        ({"compute": 30.0, "wait": 10.0}, None),
        ({"compute": 30.0, "wait": 9.0}, "miss their sum by 1.000 ms"),
        ({"compute": 50.0, "wait": -10.0}, "longer than its step"),
        ({"compute": 40.0, "wait": float("nan")}, "has no number"),
        ({}, None),
    ],
)
def test_cells_that_cannot_be_those_of_a_step_are_found(cells, wrong):
    step = np.full((2, 3), 40.0)
    found = in_cells(step, {name: np.full((2, 3), ms) for name, ms in cells.items()})
    assert (found is None) if wrong is None else wrong in found


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, None),
        ({"ms": -1.0}, "-1.0 ms"),
        ({"rank": 7}, "there is no rank 7"),
        ({"interval_ms": (11.0, 14.0)}, "10.000 ms lie outside of [11.000, 14.000]"),
        ({"share": 1.2}, "120.0 % of the whole"),
        ({"ms": 50.0, "interval_ms": None}, "50.000 ms of a step of 40.000 ms"),
        ({"interval_ms": (8.0, 45.0)}, "up to 45.000 ms of a step"),
        ({"bound_ms": 35.0}, "a step of 40.000 ms would take 35.000 ms"),
        ({"ms": 13.0, "interval_ms": None, "bound_ms": 27.0}, "the cells of a step hold 12.000 of it"),
        ({"is_in_step": False, "ms": 50.0, "interval_ms": None}, None),
    ],
)
def test_a_cause_that_cannot_be_of_its_account_is_found(changed, wrong):
    account = SimpleNamespace(mean_step_ms=40.0, ranks=[0, 1], limits=LIMITS)
    cause = Cause(
        kind="data_loading", subject="data loading", ms=10.0, interval_ms=(8.0, 12.0), why_no_interval="",
        bound_ms=28.0, share=0.25, evidence=(), change="", check="", source="records",
    )  # fmt: skip
    found = [*in_cause(msgspec.structs.replace(cause, **changed), {"data": 12.0}, {"data": 12.0}, account)]
    assert (found == []) if wrong is None else wrong in found[0]


# ---- a contradiction while a report is made ------------------------------------------------------


def test_a_cause_that_contradicts_its_account_is_not_named(tmp_path, monkeypatch):
    """Made to claim more than its cells hold."""

    def more(finding, *rest):
        cause = whole(finding, *rest)
        return None if cause is None else msgspec.structs.replace(cause, ms=3 * cause.ms)

    whole = rank_of_causes.cause_of
    monkeypatch.setattr(rank_of_causes, "cause_of", more)
    report, explained, why, printed = outputs(run_of(tmp_path / "run", slow_loader))
    assert explained.listed == []
    for text in (why, printed):
        assert "Cannot tell what data loading on all ranks costs" in re.sub(r"\s+", " ", text)
        assert "please report it" in re.sub(r"\s+", " ", text)
        assert "Nothing worth changing" not in text
    assert "Cannot tell what data loading" in page(report)


def test_cells_that_miss_their_sum_are_no_account(tmp_path, monkeypatch):
    """Compute counted twice."""

    def twice(*parts):
        cells = whole(*parts)
        return cells | {"compute": 2 * cells["compute"]}

    whole = cells._of_cpu
    monkeypatch.setattr(cells, "_of_cpu", twice)
    judged = judge(load_run(run_of(tmp_path / "run", lambda *_: Host().work(30.0).comm(2.0)), "a"))
    account = cells.account_of(judged)
    assert set(account.cells) == {"not_measured"}
    assert account.mean_ms("not_measured") == pytest.approx(account.mean_step_ms)
    explained = found_causes(judged)
    assert explained.listed == []
    assert "Cannot tell where a step's time went: cell compute is longer" in explained.cannot_tell[0]


def test_a_sentence_that_contradicts_the_step_is_left_out(tmp_path):
    judged = judge(load_run(run_of(tmp_path / "run", slow_loader), "a"))
    explained = found_causes(judged)
    cause = msgspec.structs.replace(
        explained.listed[0], evidence=("rank 0 waits 151.7 ms a step for it", "it is seen in 22 of 22 steps")
    )
    taken = {"data": cause.ms}
    kept, cannot_tell = without_contradictions([(cause, taken)], cells.account_of(judged))
    assert kept[0][0].evidence == ("it is seen in 22 of 22 steps",)
    assert "151.7 ms of a step" in cannot_tell[0]
    too_much = [(cause, taken), (cause, taken)]
    assert "are left" in without_contradictions(too_much, cells.account_of(judged))[1][-1]


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ("fused=True in the optimizer", "offers what is in force"),
        ("DataLoader(num_workers={workers})", "«{workers}» stands for a number"),
    ],
)
def test_a_remedy_that_cannot_be_given_is_not(tmp_path, change, wrong):
    judged = judge(load_run(run_of(tmp_path / "run", slow_loader), "a"))
    explained = found_causes(judged)
    cause = msgspec.structs.replace(explained.listed[0], change=change)
    in_force = frozenset({"fused"})
    kept, _ = without_contradictions([(cause, {"data": cause.ms})], cells.account_of(judged), in_force)
    assert "Cannot tell what would mend data loading" in kept[0][0].change
    assert wrong in kept[0][0].change


# ---- made runs of many shapes --------------------------------------------------------------------

PARTS = ("work", "comm", "idle", "data", "optimizer", "synchronisation", "checkpoint", "garbage_collection")
SHAPE = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "width": st.integers(1, 3),
        "source": st.sampled_from(["host", "kernels"]),
        "parts": st.lists(st.sampled_from(PARTS), min_size=1, max_size=7),
        "scale_ms": st.sampled_from([0.02, 3.0, 400.0]),
        "late_ms": st.sampled_from([0.0, 0.0, 30.0]),
        "every": st.sampled_from([1, 1, 3, 7]),
        "noise": st.sampled_from([0.01, 0.3, 1.5]),
        "use": st.sampled_from(["none", "some", "much"]),
        "steps": st.sampled_from([3, 9, 24, 40]),
    }
)


def made(shape):
    sizes = np.random.default_rng(shape["seed"])
    usual = [float(sizes.exponential(shape["scale_ms"])) for _ in shape["parts"]]

    def make(rank, step, noise):
        host, is_late = Host(), rank == 0 and step % shape["every"] == 0
        if is_late and shape["late_ms"]:
            host.work(shape["late_ms"])
        for part, ms in zip(shape["parts"], usual, strict=True):
            length = ms * noise.lognormvariate(0, shape["noise"])
            if part == "comm":
                host.comm(length + (0.0 if is_late else shape["late_ms"]) + 1e-3)
            elif part == "idle" and shape["source"] == "kernels":
                host.idle(length)
            elif part in ("work", "idle"):
                host.work(length)
            elif shape["source"] == "kernels" and part != "data":
                host.idle(length, part)
            elif step % shape["every"] == 0:
                host.work(length, part)
        host.work(1e-3).after(usual[0] * (step % 2))
        part = {"none": None, "some": 0.4, "much": 1.0}[shape["use"]]
        use = None if part is None else HostUse(part * host.at, 0.3 * host.at)
        return host, {"source": shape["source"], "host_use": use, "world_size": shape["width"]}

    return make


LONGER_DETAILED_STEPS = {
    **{"seed": 2, "width": 1, "source": "host", "parts": ["comm", "comm"], "scale_ms": 0.02, "late_ms": 0.0},
    **{"every": 1, "noise": 1.5, "use": "none", "steps": 40},
}


@settings(max_examples=15)
@given(SHAPE)
@example(LONGER_DETAILED_STEPS)
def test_whatever_a_run_is_nothing_that_is_said_of_it_contradicts_itself(tmp_path_factory, shape):
    folder = run_of(
        tmp_path_factory.mktemp("made") / "run",
        made(shape),
        steps=shape["steps"],
        seed=shape["seed"],
        width=shape["width"],
    )
    assert list(disagreements(*outputs(folder))) == []


# ---- runs and traces that others recorded --------------------------------------------------------

OWN = ("run_fsdp", "run_late_rank", "traces_kineto")


@pytest.mark.parametrize("name", OWN)
def test_outputs_of_a_recorded_run_agree(name):
    assert list(disagreements(*outputs(DATA / name))) == []


QUICK = ("mi250_toy_kineto.json.gz", "ranks_0_1_of_128")
CORPUS = [
    pytest.param(path, id=f"{folder}/{path.name}", marks=() if path.name in QUICK else pytest.mark.slow)
    for folder in ("traces", "traces_foreign", "runs")
    for path in sorted((FOLDER / folder).glob("*"))
    if path.name != "README.md"
]


@pytest.mark.parametrize("path", CORPUS)
@needs_data(FOLDER / "traces_foreign")
def test_outputs_of_foreign_programs_agree(path, tmp_path):
    """Step, causes and their order from report, why, page and summary.json; parts that add up to the step."""
    if path.suffix == ".tgz":
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path, filter="data")
        path = tmp_path / path.stem
    assert list(disagreements(*outputs(path))) == []


def test_causes_cannot_have_more_of_an_operation_than_is_exposed(tmp_path):
    """24 small gathers, 0.5 ms each, 12 ms exposed: what merging them saves, and hiding them on top of it."""

    def gathers(rank, step, noise):
        host = Host().work(30.0)
        for _ in range(24):
            host.comm(0.5, op="all_gather", size=64)
        return host

    exposures = Exposures(judge(load_run(run_of(tmp_path / "run", gathers), "run")))
    facts = {"op": "all_gather"}
    merging = CauseFinding("small_messages", np.full(20, 8.0), {("transfer",): 1.0}, facts=facts)
    hiding = CauseFinding("no_prefetch", np.full(20, 8.0), {("transfer",): 1.0}, facts=facts)
    assert exposures.exceeded(merging, {"transfer": 8.0}) is None
    assert exposures.exceeded(hiding, {"transfer": 8.0}) == (
        "causes have 16.000 ms of all_gather, of which 12.000 are exposed"
    )


def test_a_bubble_is_of_all_sends_and_receives(tmp_path):
    """A pipeline whose stages wait in `recv` and in `send_recv`: 20 ms, of which `recv` has 12."""

    def stage(rank, step, noise):
        return Host().work(30.0).comm(12.0, op="recv", size=8).comm(8.0, op="send_recv", size=8)

    explained = found_causes(judge(load_run(run_of(tmp_path / "run", stage), "run")))
    (cause,) = explained.listed
    assert (cause.kind, cause.ms) == ("bubble", pytest.approx(20.0, rel=0.01))
    assert explained.cannot_tell == []


def test_messages_between_stages_are_waited_for_and_not_too_small(tmp_path):
    """A dozen of micro-batches a step, each received 2 ms after it was asked for."""

    def make(rank, step, noise):
        host = Host().work(30.0)
        for _ in range(12):
            host = host.comm(2.0, op="recv", size=65_536)
        return host

    (cause,) = found_causes(judge(load_run(run_of(tmp_path / "run", make), "run"))).listed
    assert (cause.kind, "micro-batches" in cause.change) == ("bubble", True)
