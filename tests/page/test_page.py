"""What is in the file. tests/page/test_page_in_browser.py has what a reader sees of it."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest

from aorta.account.cause import Cause
from aorta.account.judge.cells import account_of
from aorta.account.model import Causes, ConfidenceInterval, SettingDifference
from aorta.errors import ReportError
from aorta.page.html import page, write_page
from aorta.page.parts import Markup, byte_text, json_script, number, percent, tag, title
from aorta.page.table import account_rows
from aorta.page.timeline import MAX_FURTHER, MAX_MARKS, packed, steps_to_show, timeline_data
from aorta.page.where_time_goes import account_data
from aorta.page.write import make_report
from aorta.records.schema import CollectiveRecord
from tests.account.reports_in_memory import comparison_of, dataset_of, records_of, report_of
from tests.page.hostile_report import HOSTILE, hostile_report
from tests.records.run_folders import run_record, step_record, step_timeline, write_run

ROOT = Path(__file__).parents[2]


class Elements(HTMLParser):
    """Elements by name, and the text of each script and style."""

    def __init__(self, source):
        super().__init__()
        self.found, self.texts, self._open = [], [], None
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._open = tag if tag in ("script", "style") else None
        if self._open:
            self.texts.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open:
            self.texts[-1][2] += data

    def named(self, name):
        return [attrs for tag, attrs in self.found if tag == name]


def two_sides(**changes):
    return dataset_of("ref", records_of()), dataset_of("cand", records_of(slowdown=1.1, seed=1), **changes)


# ---- the file ----------------------------------------------------------------------------------


@pytest.mark.heavy
def test_the_file_is_whole_or_absent(tmp_path):
    write_page(tmp_path / "report.html", report_of(two_sides()[0]))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(ReportError, match="cannot write"):
        write_page(tmp_path / "absent" / "report.html", report_of(two_sides()[0]))


@pytest.mark.heavy
def test_the_same_report_gives_the_same_bytes():
    assert page(report_of(two_sides()[0])) == page(report_of(two_sides()[0]))


@pytest.mark.heavy
def test_nothing_points_out_of_the_file():
    elements = Elements(page(report_of(*two_sides(), comparison=True)))
    for name, attributes in elements.found:
        for attribute in ("src", "href", "action", "data", "srcset", "poster"):
            assert attributes.get(attribute, "#").startswith("#"), (name, attributes)
        assert "style" not in attributes
        assert not any(attribute.startswith("on") for attribute in attributes)


@pytest.mark.heavy
def test_the_policy_names_what_the_file_holds():
    source = page(report_of(two_sides()[0]))
    elements = Elements(source)
    (policy,) = [meta["content"] for meta in elements.named("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    hashes = {
        (name, "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'")
        for name, attributes, text in elements.texts
        if "type" not in attributes
    }
    for name, value in hashes:
        assert value in policy.split(f"{name}-src ")[1].split(";")[0]
    assert {name for name, _ in hashes} == {"script", "style"}


@pytest.mark.heavy
def test_markup_from_outside_is_text():
    source = page(hostile_report())
    elements = Elements(source)
    assert elements.named("img") == []
    assert len(elements.named("script")) == 7
    assert "window.hit" in source
    assert "<!--" not in source
    assert "\u2028" not in source.split('id="timeline-data"')[1].split("</script>")[0]
    (text,) = [text for _, attributes, text in elements.texts if attributes.get("id") == "timeline-data"]
    assert HOSTILE in json.loads(text)["words"]


def test_json_cannot_leave_its_script():
    data = {"a": "</script><!--<script>\u2028\u2029&"}
    source = json_script("x", msgspec.json.encode(data))
    inner = source.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert not set("<>&\u2028\u2029") & set(inner)
    assert json.loads(inner) == data


def test_elements_escape_what_is_not_markup():
    made = tag("a", "<b>", Markup("<i>"), None, ["&", 3], title='"<', class_="x", hidden=False, open=True)
    assert made == '<a title="&quot;&lt;" class="x" open>&lt;b&gt;<i>&amp;3</a>'


@pytest.mark.heavy
def test_the_example_runs_are_small_and_give_a_page():
    folder = ROOT / "docs" / "example"
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 300_000
    report = make_report([folder / "fsdp", folder / "ddp"], ["fsdp", "ddp"], "fsdp", "ddp")
    said = text_of(page(report), "answer")
    assert "ddp" in said
    assert "2 ranks on" in said


# ---- what it says ------------------------------------------------------------------------------


def text_of(source, name):
    """The words of a section."""
    inner = re.search(rf'<section id="{name}".*?</section>', source, re.S)[0]
    return " ".join(re.sub(r"<[^>]+>", " ", inner).split())


@pytest.mark.heavy
def test_the_answer_comes_first_with_units():
    source = page(report_of(two_sides()[0]))
    dataset = two_sides()[0]
    step, exposed = (dataset.first.values(name).mean() for name in ("step_ms", "exposed_ms"))
    said = text_of(source, "answer")
    share = f"{100 * exposed / step:.0f} % of it is exposed communication"
    assert said.startswith(f"ref: a step takes {step:.1f} ms; {share}")
    assert source.index('id="answer"') < source.index('id="time"') < source.index('id="timeline"')


@pytest.mark.heavy
def test_host_bound_steps_stand_beside_the_answer_and_in_the_notes():
    """12 steps, the first is warm-up; one rank is host-bound in the last three."""
    late, other = two_sides()
    late.first.host_bound[:] = 0
    late.first.host_bound[1, 9:] = 1
    said = "host-bound: 3 of 11 steps; in these, compute, comm and hidden are upper bounds"
    alone = page(report_of(late))
    assert said.capitalize() in text_of(alone, "answer")
    assert said in text_of(alone, "notes")
    compared = text_of(page(report_of(late, other, comparison=True)), "answer")
    assert f"ref {said.capitalize()}" in compared
    assert compared.count("ost-bound") == 1


@pytest.mark.heavy
def test_a_comparison_leads_with_its_headline_and_scope():
    report = report_of(*two_sides(), comparison=True)
    metrics = report.comparison.metrics
    metrics["step_ms"] = msgspec.structs.replace(
        metrics["step_ms"], ratio=1.05, interval=ConfidenceInterval(0.995, 1.105)
    )
    source = page(report)
    said = text_of(source, "answer")
    assert said.startswith(report.comparison.headline)
    assert "About these two runs only" in said
    verdicts = text_of(source, "changes")
    assert "+5.0 % [\u22120.5, +10.5]" in verdicts
    assert "\u2717 worse" in verdicts
    assert "Difference: of the medians beside it. Change: candidate against reference in steps" in verdicts


def test_bars_are_proportional_to_the_parts():
    """Step 10 ms: compute only 8 - 3.5 = 4.5, hidden 3.5, unsplit communication 1, idle 1; the longest fills
    the width."""
    by_rank = {0: [step_record(step_timeline(step=i), 1) for i in range(4)]}
    source = page(report_of(dataset_of("a", by_rank)))
    bar = re.search(r'<svg height="20" role="img" aria-label="compute:.*?</svg></td>', source, re.S)[0]
    widths = re.findall(r'<rect x="([\d.]+)%" width="([\d.]+)%"[^>]*class="m-(\w+)"', bar)
    assert [(name, float(x), float(width)) for x, width, name in widths] == [
        ("compute", 0, 45), ("hidden", 45, 35), ("exposed", 80, 10), ("idle", 90, 10),
    ]  # fmt: skip


def test_the_rows_below_the_bars_are_those_of_the_terminal():
    dataset = dataset_of("a", records_of(num_ranks=3))
    said = text_of(page(report_of(dataset)), "time")
    rows = account_rows(dataset)
    assert rows[-1][0] == "step"
    for row in rows:
        assert " ".join(" ".join(row).split()) in said


def cause(**fields):
    """10 ms, between 8 and 12, of a step of 40 ms."""
    known = {"ms": 10.0, "interval_ms": (8.0, 12.0), "bound_ms": 28.0, "share": 0.25, "rank": 1}
    return Cause(
        **known | fields, kind="late_rank", subject="rank 1 is late", source="records", global_step=3,
        evidence=(), change="", check="",
    )  # fmt: skip


def with_causes(*listed):
    """Of steps of 40 ms."""
    report = report_of(dataset_of("a", records_of()))
    account_of(report.datasets["a"].first).step_ms[:] = 40.0
    causes = Causes(
        [*listed], empty_text="nothing", title="a: a step takes 40.0 ms", notes=["Not explained: little."]
    )
    return page(msgspec.structs.replace(report, causes={"a": causes}))


def pictures_of_causes(source):
    return re.findall(r'<svg height="18".*?</svg>', re.search(r'<ol class="causes">.*?</ol>', source)[0])


def test_the_largest_cause_is_the_first_sentence():
    """Of a step of 40 ms 10 is rank 1's, between 8 and 12: the picture has 30 ms, then the cause."""
    source = with_causes(cause())
    headline = "Rank 1 is late: 10.0 ms a step, 25 % [8.00, 12.0] ms; without it a step takes 28.0 to 32.0 ms"
    assert text_of(source, "answer").startswith(f"{headline} a: a step takes 40.0 ms")
    (picture,) = pictures_of_causes(source)
    assert re.findall(r'width="([\d.]+)%"', picture) == ["75.000", "25.000"]
    assert 'x1="70.000%" x2="80.000%"' in picture
    assert "Not explained: little." in text_of(source, "causes")


def test_what_a_mended_step_takes_is_told_by_both_ends_from_half_of_the_step_on():
    """The interval of 10 ms is 8 to 12."""
    assert cause(bound_ms=20.0).headline.endswith("; without it a step takes 20.0 to 24.0 ms")
    assert "without it" not in cause(bound_ms=19.0).headline


def test_a_loss_between_steps_is_part_of_a_step_and_what_follows_it():
    """60 ms are 0.6 of 100 ms."""
    between = cause(ms=60.0, interval_ms=None, share=0.6, is_in_step=False)
    (picture,) = pictures_of_causes(with_causes(between))
    assert re.findall(r'width="([\d.]+)%"', picture) == ["40.000", "60.000"]
    assert "of the run for each step, 100.0 ms: 60.0 ms" in picture


def test_where_there_is_no_cause_that_is_the_first_sentence():
    report = report_of(dataset_of("a", records_of()))
    causes = Causes(
        [],
        empty_text="Nothing worth changing: all is well. Roofline: not known.",
        title="a: a step takes 40 ms",
    )
    said = text_of(page(msgspec.structs.replace(report, causes={"a": causes})), "answer")
    assert said.startswith("Nothing worth changing: all is well a: a step takes 40 ms Roofline: not known.")


def levels_of(run):
    """[cell, rank, column] in ms."""
    levels = np.frombuffer(base64.b64decode(run["levels"]), "<u2").astype(float) * run["ms_per_level"]
    return levels.reshape(len(run["cells"]), len(run["ranks"]), len(run["from"]))


def test_the_steps_of_a_rank_are_those_of_the_account():
    dataset = dataset_of("a", records_of(num_steps=12))
    (run,) = account_data(report_of(dataset))
    account = account_of(dataset.first)
    assert run["from"] == run["to"] == account.global_step.tolist()
    assert run["note"] == ""
    assert levels_of(run).sum(axis=0) == pytest.approx(account.step_ms, rel=1e-3)


def test_of_many_steps_neighbours_share_a_column(monkeypatch):
    """11 judged steps in 4 columns of 3, 3, 2 and 3."""
    monkeypatch.setattr("aorta.page.where_time_goes.MAX_COLUMNS", 4)
    dataset = dataset_of("a", records_of(num_steps=12))
    (run,) = account_data(report_of(dataset))
    step_ms = account_of(dataset.first).step_ms
    assert list(zip(run["from"], run["to"], strict=True)) == [(1, 3), (4, 6), (7, 8), (9, 11)]
    assert run["note"].startswith("11 steps in 4 columns")
    assert levels_of(run).sum(axis=0)[:, 0] == pytest.approx(step_ms[:, :3].mean(axis=1), rel=1e-3)


@pytest.mark.heavy
def test_of_many_ranks_some_are_drawn_and_that_is_said():
    said = text_of(page(report_of(dataset_of("a", records_of(num_steps=3, num_ranks=100)))), "time")
    assert "64 of 100 ranks are drawn" in said
    assert said.count("rank ") < 70


def test_what_was_not_measured_has_its_reason_and_no_zero():
    by_rank = records_of(num_steps=4)
    dataset = dataset_of(
        "a", by_rank, not_measured={"exposed_ms": "there is no device", "compute_ms": "no device"}
    )
    run = dataset.first
    for name in ("exposed_ms", "hidden_ms", "compute_ms", "idle_ms", "overlap_ratio"):
        run.metrics[name] = np.full_like(run.metrics[name], np.nan)
        dataset.statistics[name] = msgspec.structs.replace(
            dataset.statistics[name], median=None, p95=None, min=None, max=None
        )
    source = page(report_of(dataset))
    assert "overlap was not measured" in text_of(source, "answer")
    assert "Not measured: the parts of a step (no device)" in text_of(source, "time")
    assert "there is no device" in text_of(source, "notes")


def test_no_details_is_said():
    by_rank = records_of(num_steps=4, active_segments=None)
    for records in by_rank.values():
        records[:] = [msgspec.structs.replace(record, collectives=None) for record in records]
    source = page(report_of(dataset_of("a", by_rank)))
    assert "no step has its details from every rank" in text_of(source, "timeline")


@pytest.mark.heavy
def test_differences_of_the_configuration_are_listed():
    a, b = two_sides()
    report = report_of(a, b, comparison=True)
    rows = [SettingDifference("environment", "NCCL_PROTO", "LL128", None)]
    said = text_of(page(msgspec.structs.replace(report, comparison=comparison_of(a, b, rows))), "changes")
    assert "environment NCCL_PROTO LL128 not set" in said


def test_the_page_claims_no_sums_of_medians(tmp_path):
    write_page(tmp_path / "report.html", report_of(two_sides()[0]))
    page = (tmp_path / "report.html").read_text()
    assert "hold in every step, in totals and in means" in page
    assert "medians need not add up" in page


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (float("nan"), "n/a"), (0.0, "0.00"), (41.23, "41.2"), (4.314, "4.31"), (0.0521, "0.052"),
     (12345.6, "12,346"), (-0.5, "\u22120.500"), (2e-5, "<0.001")],
)  # fmt: skip
def test_numbers_have_the_digits_that_mean_something(value, text):
    assert number(value) == text


def test_words():
    assert byte_text(64 << 20) == "64.0 MiB"
    assert byte_text(4) == "4 B"
    assert percent(0.123) == "12 %"
    assert percent(-0.0001, sign=True, digits=1) == "0.0 %"
    assert title("exposed_ms.all_gather") == "exposed communication, all_gather"


# ---- the timeline ------------------------------------------------------------------------------


def test_chosen_steps_are_judged_and_have_details():
    """Six judged steps of 10, 30, 20, 60, 40, 50 ms: the median is one of them, not between two."""
    lengths = [99, 10, 30, 20, 60, 40, 50]
    by_rank = {0: [step_record(step_timeline(compute=ms - 2.0, step=i), 1) for i, ms in enumerate(lengths)]}
    (steps,) = steps_to_show(report_of(dataset_of("a", by_rank)))
    telling = {"median": 2, "slowest": 4, "first": 1, "last": 6}
    assert steps.chosen == telling | {"step 3": 3, "step 5": 5}
    assert sorted(steps.records) == [1, 2, 3, 4, 5, 6]


def test_of_further_steps_as_many_as_fit_are_there(monkeypatch):
    """Ranks of about 7 marks a step: of 50 marks there is room for 3 or 4 steps of two ranks, beside the four
    telling ones."""
    monkeypatch.setattr("aorta.page.timeline.MAX_FURTHER_MARKS", 50)
    (steps,) = steps_to_show(report_of(dataset_of("a", records_of(num_steps=30))))
    further = [step for name, step in steps.chosen.items() if name.startswith("step ")]
    marks = [
        len(record.active_segments) + len(record.collectives)
        for step in further
        for record in steps.records[step].values()
    ]
    assert further
    assert sum(marks) <= 50
    assert sorted(steps.records) == sorted(set(steps.chosen.values()))


def with_gathers(folder, group_ranks):
    """Two ranks, three steps; rank 1 arrives at the gather of each 4 ms after rank 0."""
    records = []
    for step in range(3):
        for rank in range(2):
            line = step_timeline(rank=rank, step=step)
            row = CollectiveRecord(
                op="all_gather", stream="allgather", group="dp", ranks=group_ranks, bytes=1 << 20, seq=step,
                dtype="bfloat16", start_ms=1.0 + 4 * rank, end_ms=9.0, algbw_gb_s=None, busbw_gb_s=None,
            )  # fmt: skip
            records.append(step_record(line, 2, collectives=[row]))
    return make_report([write_run(folder, records, run_record(2))], ["a"])


def collectives_drawn(report):
    data = timeline_data(steps_to_show(report))
    ranks = next(iter(data["runs"][0]["steps"].values()))["ranks"]
    lanes = [lane for rank in ranks for row in rank["rows"] if row["kind"] == "comm" for lane in row["lanes"]]
    return data, [span for lane in lanes for span in lane]


def test_the_late_rank_makes_the_others_wait(tmp_path):
    data, spans = collectives_drawn(with_gathers(tmp_path / "run", [0, 1]))
    assert [span[9] for span in spans] == [4.0, 0.0]
    assert [data["words"][span[2]] for span in spans] == ["all_gather", "all_gather"]


def test_no_wait_is_claimed_where_a_rank_is_missing(tmp_path):
    _, spans = collectives_drawn(with_gathers(tmp_path / "run", [0, 1, 2, 3]))
    assert spans
    assert {span[9] for span in spans} == {None}


def test_clocks_are_known_as_well_as_ranks_see_the_same_collective_end(tmp_path):
    """A rank's own clock is known to a us. Ranks see ends 0.4 ms apart, now the one first, now the other."""
    by_rank = records_of(num_steps=12, source="host")
    for rank, records in by_rank.items():
        for i, record in enumerate(records):
            late_ms = 0.4 * (rank == i % 2)
            call = msgspec.structs.replace(
                record.collectives[0], bytes=64, seq=i, start_ms=5.0, end_ms=9.0 + late_ms
            )
            records[i] = msgspec.structs.replace(
                record, collectives=[call], clock_error_us=1.0, start_unix_ns=10**15 + i * 10**9
            )
    folder = write_run(tmp_path / "run", [one for records in by_rank.values() for one in records])
    report = make_report([folder], ["a"])
    step = next(iter(timeline_data(steps_to_show(report))["runs"][0]["steps"].values()))
    known_us = {rank["clock_error_us"] for rank in step["ranks"]}
    assert known_us == {report.datasets["a"].first.clock_residual_us}
    assert min(known_us) == pytest.approx(400, rel=0.5)


def test_collectives_at_once_are_in_lanes():
    by_rank = records_of(num_steps=2, num_ranks=1)
    for records in by_rank.values():
        for i, record in enumerate(records):
            base = record.collectives[1]
            rows = [
                msgspec.structs.replace(base, start_ms=a, end_ms=b, seq=i)
                for i, (a, b) in enumerate([(0, 4), (2, 6), (5, 7)])
            ]
            records[i] = msgspec.structs.replace(record, collectives=rows)
    data = timeline_data(steps_to_show(report_of(dataset_of("a", by_rank, num_warmup=0))))
    (row,) = [row for row in data["runs"][0]["steps"]["0"]["ranks"][0]["rows"] if row["kind"] == "comm"]
    assert [[span[:2] for span in lane] for lane in row["lanes"]] == [[[0, 4], [5, 7]], [[2, 6]]]


def test_spans_of_the_page_are_told_from_the_end_of_the_one_before():
    spans = {
        "states": [[-0.5, 1.0, 0], [1.0, 1.25, 3]],
        "rows": [{"lanes": [[[2.0001, 3.0, 7], [2.5, 4.0, 8]]]}],
    }
    (run,) = packed({"runs": [{"steps": {"5": {"ranks": [spans]}}}]})["runs"]
    (rank,) = run["steps"]["5"]["ranks"]
    assert rank["states"] == [[-5000, 15000, 0], [0, 2500, 3]]
    assert rank["rows"] == [{"lanes": [[[20001, 9999, 7], [-5000, 15000, 8]]]}]


@pytest.mark.heavy
def test_a_large_run_embeds_a_few_steps():
    """8 ranks, 50 steps, 100 collectives: under 1.2 MB beside the plotting library."""
    report = report_of(dataset_of("a", records_of(num_steps=50, num_ranks=8, num_collectives=100)))
    data = timeline_data(steps_to_show(report))
    num = [len(step["ranks"]) for step in data["runs"][0]["steps"].values()]
    assert num[:4] == [8, 8, 8, 8]
    assert len(num) <= 4 + MAX_FURTHER
    assert len(msgspec.json.encode(data)) < 1_200_000
    assert len(page(report)) < 3_200_000


def test_what_does_not_fit_is_cut_and_said(monkeypatch):
    monkeypatch.setattr("aorta.page.timeline.MAX_MARKS", 1)
    assert MAX_MARKS > 1
    by_rank = records_of(num_steps=3, num_ranks=1)
    from aorta.timeline.types import Segment

    many = [Segment(i * 0.05, i * 0.05 + 0.02, ["compute"], 1) for i in range(600)]
    for records in by_rank.values():
        records[:] = [msgspec.structs.replace(record, active_segments=many) for record in records]
    data = timeline_data(steps_to_show(report_of(dataset_of("a", by_rank))))
    rank = next(iter(data["runs"][0]["steps"].values()))["ranks"][0]
    assert len(rank["states"]) == 200
    assert rank["cut"] == pytest.approx(5.0)


def test_of_many_ranks_the_least_and_the_most_exposed_are_there():
    dataset = dataset_of("a", records_of(num_steps=4, num_ranks=20))
    exposed = dataset.first.values("exposed_ms").mean(axis=1)
    (steps,) = steps_to_show(report_of(dataset))
    assert len(steps.ranks) == 16
    assert {int(exposed.argmin()), int(exposed.argmax())} <= set(steps.ranks)
