"""aorta why on traces: causes of the same account as those of runs, and the critical path beside them."""

import json

import pytest
from click.testing import CliRunner

from aorta.cli.why import why_command
from aorta.errors import AortaError
from aorta.traces.host_spans import library_of_range
from aorta.why.causes.text import of_trace
from tests.larger_data import FOLDER, needs_data
from tests.why.replay.by_hand import COMM, COMPUTE, HandTrace
from tests.why.replay.hand_steps import device_bound, two_ranks


def why(*arguments: object) -> str:
    result = CliRunner().invoke(why_command, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def answer_of(folder):
    return json.loads(why(folder, "--json"))


def test_two_ranks_lose_what_is_exposed(tmp_path):
    """A step of 415 us; 100 us of it is an all_reduce that nothing hides, 40 us the wait for rank 1."""
    two_ranks(tmp_path)
    answer = answer_of(tmp_path)
    assert answer["source"] == "kineto"
    cells = {row["name"]: row["mean_ms"] for row in answer["account"]}
    assert cells["transfer"] == pytest.approx(0.1, abs=0.005)
    assert sum(cells.values()) == pytest.approx(answer["step_ms"], rel=1e-6)
    assert sum(cause["ms"] for cause in answer["causes"]) <= answer["step_ms"]


def test_the_critical_path_stands_below_the_causes(tmp_path):
    two_ranks(tmp_path)
    text = why(tmp_path)
    assert text.index("a step takes") < text.index("critical path of traced step")
    assert "2 waits between streams" in text or "4 waits between streams" in text
    answer = answer_of(tmp_path)
    replayed = sum(part["ms"] for part in answer["critical_path"])
    assert replayed == pytest.approx(answer["replayed_step_ms"])


def test_a_trace_without_steps_says_nothing_of_a_step():
    """As rules word it, and as it is said of a whole trace."""
    assert of_trace("fetching takes 3.0 ms of a 9.0 ms step on rank 1, in 1 of 1 judged steps") == (
        "fetching takes 3.0 ms of a 9.0 ms trace on rank 1"
    )
    assert of_trace("idles for up to 5.0 ms a step after") == "idles for up to 5.0 ms of the trace after"
    assert of_trace("40 all_reduce calls a step of 4 KiB take 0.1 ms each") == (
        "40 all_reduce calls in the trace of 4 KiB take 0.1 ms each"
    )


def test_nothing_is_said_to_be_worth_changing_in_a_step_of_compute(tmp_path):
    device_bound(tmp_path)
    assert "Nothing worth changing" in why(tmp_path)


def test_several_changes_at_once(tmp_path):
    two_ranks(tmp_path)
    text = why(tmp_path, "--if", "all_reduce x0.5", "--if", "rank 1 on time")
    assert "if all_reduce x0.5 and rank 1 on time" in text
    assert "0.41 ms -> 0.3" in text
    changed = json.loads(why(tmp_path, "--json", "--if", "all_reduce x2"))
    assert changed["predicted_ms"] - changed["step_ms"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--if", "all_reduc x2"], "did you mean", id="change"),
        pytest.param(["--if", "all_reduce x2", "--steps", "7:9"], "hold the steps 0", id="steps"),
        pytest.param(["--steps", "7:9"], "has steps 0 to 0, none from 7 to 9", id="steps-of-the-account"),
        pytest.param(["--steps", "x"], "FIRST:LAST", id="words"),
        pytest.param(["--steps", "9:7"], "comes before the first", id="span"),
        pytest.param(["--if", "all_reduce x2", "--ranks", "0"], "needs all ranks", id="ranks"),
        pytest.param(["--if", "all_reduce x2", "--warmup", "1"], "--steps chooses", id="warmup"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, says, tmp_path):
    two_ranks(tmp_path)
    with pytest.raises(AortaError, match=says):
        CliRunner().invoke(why_command, [str(tmp_path), *arguments], catch_exceptions=False)


def test_what_cannot_be_replayed_has_its_causes_all_the_same(tmp_path, monkeypatch):
    two_ranks(tmp_path)
    monkeypatch.setattr("aorta.why.causes.whatifs.MOST_BYTES", 1)
    text = why(tmp_path)
    assert "1. " in text
    assert "Not replayed: 0 MiB of traces: aorta why TRACES --if CHANGE does" in text


def first_of_exposed(tmp_path, scope, op, last):
    """The first cause of a step of two kernels with a collective between them that nothing hides."""
    trace = HandTrace(0, world=2)
    trace.scope(scope, 0.0, 20.0, "cpu_op")
    trace.kernel("gemm", 10.0, 100.0)
    trace.wait(COMM, trace.record(), COMPUTE)
    trace.collective(op, 112.0, 300.0)
    trace.wait(COMPUTE, trace.record(), COMM)
    trace.kernel(last, 414.0, 100.0)
    trace.step(0, -1.0, trace.host)
    return answer_of(trace.write(tmp_path))["causes"][0]


def test_advice_is_for_the_operation_at_hand(tmp_path):
    first = first_of_exposed(tmp_path, "DistributedDataParallel.forward", "all_to_all", "gemm")
    assert first["subject"] == "exposed communication: all_to_all"
    assert "bucket" not in first["change"]


@pytest.mark.parametrize(("last", "is_for_a_server"), [("gemm", True), ("multi_tensor_apply_kernel", False)])
def test_advice_for_a_server_is_none_where_an_optimizer_runs(tmp_path, last, is_for_a_server):
    """Its operators are in the trace, a backward pass is not."""
    first = first_of_exposed(tmp_path, "aten::mm", "all_reduce", last)
    assert ("where the server has one" in first["change"]) == is_for_a_server


def test_what_a_trace_holds_in_no_step_is_said(tmp_path):
    """Kernels of 20 to 220 us are in a step of 221 us, those from 1000 to 1200 in none."""
    trace = HandTrace(0)
    trace.kernel("gemm", 20.0, 200.0)
    trace.step(0, -1.0, trace.host)
    trace.kernel("gemm", 1000.0, 200.0)
    trace.write(tmp_path)
    text = " ".join(why(tmp_path).split())
    assert "Outside of the judged steps: 0.959 ms of the 1.18 ms that the trace covers: " in text
    assert "before the device reaches the first step or behind the last." in text


FOREIGN = FOLDER / "traces_foreign"


@needs_data(FOREIGN)
def test_advice_for_a_trace_of_inference_is_none_for_training():
    """One forward pass of a server, without a backward pass or an update."""
    causes = answer_of(FOREIGN / "b200_vllm_eager_rank0of8_kineto.json.gz")["causes"]
    changes = " ".join(cause["change"] for cause in causes)
    assert not any(word in changes for word in ("loss", "accumulation", "clip_grad", "optimizer"))
    assert "eager mode off in the server" in changes


@needs_data(FOREIGN)
def test_a_server_that_only_copies_lists_of_tensors_trains_nothing():
    """Of one decoding step, with kernels of _foreach_copy_, which are named like an optimizer's."""
    (first,) = answer_of(FOREIGN / "mi300x_sglang_decode_kineto.json.gz")["causes"]
    assert "asynchronous scheduling" in first["change"]
    assert "clip_grad" not in first["change"]


@needs_data(FOREIGN)
def test_a_forward_pass_of_a_program_of_ones_own_is_no_servers():
    (first,) = answer_of(FOREIGN / "h100_qwen_kineto.json.gz")["causes"]
    assert first["change"].startswith("torch.compile(model, mode='reduce-overhead')")


@pytest.mark.parametrize(
    ("scope", "part_of_change"),
    [("DistributedDataParallel.forward", "a bf16 communication hook"), ("forward", "async_op=True")],
)
def test_the_ranges_of_a_trace_tell_who_reduces_its_gradients(scope, part_of_change, tmp_path):
    first = first_of_exposed(tmp_path, scope, "all_reduce", "multi_tensor_apply_kernel")
    assert first["subject"] == "exposed communication: all_reduce"
    assert part_of_change in first["change"]


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("DistributedDataParallel.forward", "ddp"),
        ("torch.distributed.ddp.reducer::search_unused_parameters", "ddp"),
        ("execute_context_1(888_788544)_generation_0(0)", "server"),
        ("step[DECODE bs=32]", "server"),
        ("[Executor] _forward_step 7: 1 ctx reqs", "server"),
        ("vllm::moe_forward", "server"),
        ("step[7]", None),
        ("step 7", None),
        ("ProfilerStep#7", None),
    ],
)
def test_names_of_ranges_tell_what_runs_the_program(name, library):
    assert library_of_range(name) == library


@pytest.mark.parametrize(
    ("kind", "part_of_change"),
    [
        ("Shampoo", "Shampoo is none of torch.optim"),
        ("RMSprop", "RMSprop has no fused form here"),
        ("AdamW", "fused=True where the optimizer has it"),
    ],
)
def test_an_optimizer_that_a_trace_names_is_not_told_what_it_does_not_have(kind, part_of_change, tmp_path):
    """The device idles for 600 us of 1000, in all of which the host is in the optimizer."""
    trace = HandTrace()
    trace.scope("aten::mm", 0.0, 6.0, "cpu_op")
    trace.kernel("gemm", 10.0, 190.0)
    trace.scope(f"Optimizer.step#{kind}.step", 150.0, 900.0)
    trace.think(784.0)
    trace.kernel("multi_tensor_apply_kernel", 800.0, 200.0)
    trace.step(0, -1.0, 999.0)
    (first,) = answer_of(trace.write(tmp_path))["causes"]
    assert first["kind"] == "optimizer"
    assert first["change"].startswith(part_of_change)
    assert kind == "AdamW" or "fused=True" not in first["change"]


def test_the_path_is_of_no_step_that_launches_nothing(tmp_path):
    trace = HandTrace()
    trace.kernel("gemm", 10.0, 190.0)
    trace.step(0, -1.0, 200.0)
    trace.step(1, 200.0, 201.0)
    answer = answer_of(trace.write(tmp_path))
    assert (answer["num_steps"], answer["replayed_step"]) == (1, 0)


def test_a_step_is_as_long_on_the_path_as_in_the_account(tmp_path):
    """A kernel that was launched before the trace runs until 500 us; the step goes on from 20 until 700."""
    trace = HandTrace()
    trace.kernel("gemm", 10.0, 490.0)
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    trace.think(24.0)
    trace.kernel("gemm", 500.0, 200.0)
    trace.step(0, 20.0, 60.0)
    answer = answer_of(trace.write(tmp_path))
    assert answer["step_ms"] == pytest.approx(0.2)
    assert answer["replayed_step_ms"] == pytest.approx(0.2)
