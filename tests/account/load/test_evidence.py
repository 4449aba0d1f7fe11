"""What is said of communication that was found, that may be there, and that cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aorta.account.judge.judged import judge, missing
from aorta.account.load.evidence import CommEvidence, comm_evidence
from aorta.account.load.open import load_run
from aorta.account.model import Run
from aorta.records.files import kernels_name
from aorta.records.schema import KernelNames, KernelSums
from aorta.records.writer import write_json
from aorta.timeline.types import Kind
from aorta.traces.classify import COMM_RULES, CommRule
from aorta.traces.steps import Reading
from tests.larger_data import FOLDER, needs_data
from tests.records.run_folders import run_record, step_record, step_timeline, write_run
from tests.traces.kineto_events import kernel, launch, mark

DEEPSEEK = FOLDER / "traces_foreign" / "h800_deepseek_v3_train_rank0of64_kineto.json.gz"
GEMM = kernel(0, 90, name="gemm")
OF_64 = {"distributedInfo": {"rank": 0, "world_size": 64}}


def load(folder: Path, *events: dict, header: dict | None = None, rules=COMM_RULES) -> Run:
    path = folder / "rank0.json"
    path.write_text(json.dumps((header or {}) | {"traceEvents": list(events)}))
    return load_run(path, "a", reading=Reading(rules=rules))


def test_one_process_has_nobody_to_talk_to(tmp_path):
    run = load(tmp_path, GEMM)
    evidence = comm_evidence(run)
    assert (evidence.num_ranks, evidence.is_found, evidence.possible_ms) == (1, False, {})
    assert (evidence.absence, evidence.note) == ("no communication: one process", "")


def test_communication_that_was_found_needs_no_word(tmp_path):
    evidence = comm_evidence(load(tmp_path, GEMM, kernel(0, 10, name="nccl_x"), header=OF_64))
    assert (evidence.num_ranks, evidence.is_found) == (64, True)
    assert (evidence.absence, evidence.note) == ("", "")


def test_several_ranks_without_communication_are_said(tmp_path):
    run = load(tmp_path, GEMM, header=OF_64)
    absence = "no communication was recognised between 64 ranks"
    assert comm_evidence(run).absence == absence
    assert missing(judge(run))["overlap_ratio"] == absence
    assert run.notes[0] == f"warning: {absence}; --comm-rules FILE names kernels that communicate"


def test_the_files_of_several_ranks_are_groups_too(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"traceEvents": [GEMM]}))
    run = load_run(tmp_path, "a", reading=Reading())
    assert comm_evidence(run).absence == "no communication was recognised between 2 ranks"


@pytest.mark.parametrize(
    "metadata",
    [{"Group size": 8}, {"Process Group Ranks": "[0, 1, ..., 7]"}, {"Process Group Ranks": "[3, 7]"}],
)
def test_without_a_header_metadata_of_a_collective_tells_the_ranks(tmp_path, metadata):
    operator = mark(0, 5, "record_param_comms", cat="cpu_op", **{"Collective name": "allreduce"}, **metadata)
    assert comm_evidence(load(tmp_path, GEMM, operator)).num_ranks == 8


def test_kernels_that_may_be_communication_are_named_with_their_time_a_step(tmp_path):
    """Two steps with 10 of 100 µs each: 0.010 ms a step."""
    steps = [
        event
        for i in range(2)
        for event in (
            mark(1000 * i, 500, f"ProfilerStep#{i}"),
            launch(1000 * i + 1, 2 * i + 1),
            launch(1000 * i + 2, 2 * i + 2),
            kernel(1000 * i + 10, 90, correlation=2 * i + 1),
            kernel(1000 * i + 100, 10, correlation=2 * i + 2, name="void my::moe_dispatch<8>(int*)"),
        )
    ]
    run = load(tmp_path, *steps, header=OF_64)
    evidence = comm_evidence(run)
    assert evidence.possible_ms == {"moe_dispatch": pytest.approx(0.010)}
    assert evidence.absence == (
        "no communication was recognised between 64 ranks; by name these may be: moe_dispatch"
        " (0.010 ms a step)"
    )
    rules = (CommRule("moe_dispatch", "all_to_all"), *COMM_RULES)
    told = comm_evidence(load(tmp_path, *steps, header=OF_64, rules=rules))
    assert (told.is_found, told.possible_ms, told.note) == (True, {}, "")


def test_a_small_share_of_kernel_time_is_not_worth_a_word(tmp_path):
    """4 of 100 µs, below 5 %."""
    evidence = comm_evidence(
        load(tmp_path, kernel(0, 96, name="nccl_x"), kernel(96, 4, name="peer_push"), header=OF_64)
    )
    assert (evidence.possible_ms, evidence.note) == ({}, "")


def test_beside_found_communication_the_rest_is_named(tmp_path):
    evidence = comm_evidence(
        load(tmp_path, kernel(0, 90, name="nccl_x"), kernel(90, 10, name="peer_push"), header=OF_64)
    )
    assert evidence.note == (
        "these kernels count as compute, and by name may be communication: peer_push (0.010 ms a step);"
        " --comm-rules FILE names kernels that communicate"
    )


def test_in_a_job_of_one_process_names_mean_nothing(tmp_path):
    header = {"distributedInfo": {"rank": 0, "world_size": 1}}
    evidence = comm_evidence(load(tmp_path, kernel(0, 50, name="moe_dispatch"), header=header))
    assert evidence.absence == "no communication: one process"


def test_of_many_names_three_are_listed():
    possible = {"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0, "e": 0.5}
    assert CommEvidence(2, False, possible, False).note == (
        "no communication was recognised between 2 ranks; by name these may be: a (4.00 ms a step),"
        " b (3.00 ms a step), c (2.00 ms a step), 2 more"
    )


@pytest.mark.parametrize(
    ("num_ranks", "absence"),
    [(1, "no communication: one process"), (2, "no communication was recognised between 2 ranks")],
)
def test_records_of_ranks_that_never_communicate(tmp_path, num_ranks, absence):
    records = []
    for rank in range(num_ranks):
        timeline = step_timeline(rank=rank)
        line = timeline.select(timeline.kind == Kind.COMPUTE)
        records += [step_record(replace(line, step=i), num_ranks, num_collectives=0) for i in range(4)]
    run = load_run(write_run(tmp_path / "run", records), "a")
    assert comm_evidence(run).absence == absence
    assert (absence in run.notes) == (num_ranks > 1)


def test_kernels_of_records_by_their_short_names(tmp_path):
    """Of 8 ms of kernels 3 are peer_push. dispatch is short for one that the rules know, ncclX is known."""
    names = ["", "gemm", "peer_push", "void deep_ep::intranode::dispatch<8>()", "ncclX_allreduce"]
    top = [(1, 2.0, 4), (2, 3.0, 1), (3, 2.0, 1), (4, 1.0, 1)]
    kernels = KernelSums(num_kernels=7, classes={"gemm": (2.0, 4), "other": (6.0, 3)}, top=top)
    records = [
        step_record(step_timeline(rank=rank, step=i, source="kernels"), kernels=kernels)
        for i in range(3)
        for rank in range(2)
    ]
    folder = write_run(tmp_path / "run", records, run_record())
    for rank in range(2):
        write_json(folder / kernels_name(rank), KernelNames(names=names))
    run = load_run(folder, "a")
    assert comm_evidence(run).possible_ms == {"peer_push": pytest.approx(3.0)}
    assert run.notes[-1] == (
        "these kernels count as compute, and by name may be communication: peer_push (3.00 ms a step)"
    )


@needs_data(DEEPSEEK)
def test_expert_parallel_kernels_of_a_public_trace_are_communication():
    """113.44 ms of dpsk::ep:: kernels by an independent sum of its events, 109.25 of them under compute."""
    run = load_run(DEEPSEEK, "a", reading=Reading())
    total = run.totals[0]
    assert total["comm_ms"] == pytest.approx(113.44, abs=0.005)
    assert total["hidden_ms"] == pytest.approx(109.25, abs=0.005)
    evidence = comm_evidence(run)
    assert (evidence.num_ranks, evidence.is_found, evidence.note) == (64, True, "")
