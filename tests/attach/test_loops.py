"""Loops that do not know of aorta, with the hooks that `aorta run` puts on: one rank, in this process."""

import _thread
import gc
import importlib.util
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from aorta.attach import hooks
from aorta.attach.session import PROFILED_UNTIL
from aorta.attach.settings import AttachSettings
from aorta.hazards.findings import read_checked
from aorta.record.interception.switch import Interception
from aorta.record.open_steps import OpenSteps
from aorta.records.endings import ending_text
from aorta.records.reader import read_run
from aorta.records.schema import RunRecord, StepRecord

CLIENT = Path(__file__).parent / "clients" / "loop.py"
STEPS = 6
Attach = Callable[..., "Attached"]


class Attached:
    """Return what a kind of loop left."""

    def __init__(self, folder: Path, losses: list[float], counted: int) -> None:
        lines = (folder / "rank_0_metrics.jsonl").read_bytes().splitlines()
        self.steps = [msgspec.json.decode(line, type=StepRecord) for line in lines]
        self.run: RunRecord = read_run(folder)
        self.losses = losses
        self.counted = counted

    @property
    def collectives(self) -> list[int]:
        return [step.num_collectives for step in self.steps]


@pytest.fixture(scope="module")
def client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attach_client", CLIENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["attach_client"] = module
    spec.loader.exec_module(module)
    module.STEPS = STEPS
    return module


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def attached(client: ModuleType, group: None, tmp_path: Path) -> Iterator[Attach]:
    attachments: list[hooks.Attachment] = []

    def run(kind: str, **settings: object) -> Attached:
        folder = tmp_path / "run"
        attachment = hooks.Attachment(AttachSettings(output=str(folder), **settings))  # type: ignore[arg-type]
        attachments.append(attachment)
        attachment.imported("torch", torch)
        torch.manual_seed(0)
        losses: list[float] = []
        getattr(client, kind)(losses)
        counted = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        dist.destroy_process_group()
        return Attached(folder, losses, counted)

    yield run
    for attachment in attachments:
        attachment.take_off(None)
    assert Interception._installed is None
    assert torch.nn.Module.eval.__module__ == "torch.nn.modules.module"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "place", "steady"),
    [
        ("plain", "torch.optim.adamw.AdamW.step", 1),
        ("accumulation", "attach_client.Trainer.step", 3),
        ("two_optimizers", "torch.optim.sgd.SGD.step + torch.optim.sgd.SGD.step", 4),
        ("critic_first", " + ".join(4 * ["torch.optim.adam.Adam.step"]), 4),
        ("other_threads", "torch.optim.sgd.SGD.step", 1),
        ("in_backward", " + ".join(4 * ["torch.optim.sgd.SGD.step"]), 4),
        ("in_backward_and_behind", " + ".join(11 * ["torch.optim.sgd.SGD.step"]), 1),
        ("container", "attach_client.Container.step", 2),
        ("sharded", "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer.step", 5),
        ("skipping_scaler", "torch.optim.sgd.SGD.step", 1),
        ("lbfgs", "torch.optim.lbfgs.LBFGS.step", 4),
        ("evaluating", "torch.optim.adamw.AdamW.step", 1),
        ("many_micro_batches", "torch.optim.sgd.SGD.step", 1),
        ("outer_optimizer", "torch.optim.sgd.SGD.step", 1),
        ("fetched_ahead", "torch.optim.sgd.SGD.step", 1),
        (
            "compiled_optimizer",
            "attach_client.SignDescent.step (compiled: up to the next batch or backward pass)",
            1,
        ),
    ],
)
def test_every_step_is_found_and_every_collective_seen(
    attached: Attach, client: ModuleType, kind: str, place: str, steady: int
) -> None:
    result = attached(kind)
    assert [step.global_step for step in result.steps] == list(range(STEPS))
    assert [step.gap for step in result.steps] == [None] * STEPS
    assert result.collectives[2:] == [steady] * (STEPS - 2)
    assert result.run.coverage["steps_at"] == place
    assert result.run.coverage["noted_step"] >= 2
    (counts,) = result.run.coverage["groups"].values()
    assert counts["backend"] == counts["seen"]
    assert sum(result.collectives) + sum(result.run.coverage["outside_step"].values()) == counts["seen"]


@pytest.mark.heavy
@pytest.mark.parametrize("profiled", [4, 30])
def test_nothing_is_looked_at_in_the_steps_that_the_program_profiles_at_first(
    attached: Attach, client: ModuleType, monkeypatch: pytest.MonkeyPatch, profiled: int
) -> None:
    """Its trace would show all objects that there are, one by one."""

    def loop(losses: list[float]) -> None:
        model = client.ddp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for number, batch in enumerate(client.batches(30)):
                if number == profiled:
                    profiler.stop()
                model(batch).square().mean().backward()
                optimizer.step()

    monkeypatch.setattr(client, "profiled_first", loop, raising=False)
    result = attached("profiled_first")
    assert result.run.coverage["noted_step"] == min(profiled + 1, PROFILED_UNTIL)
    assert result.run.program["modes"]["num_threads"] == torch.get_num_threads()


class Stepping:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class WrappedStep(Stepping):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.step = partial(self.step)  # type: ignore[method-assign]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "wrap", [lambda optimizer: optimizer, Stepping, WrappedStep], ids=["optimizer", "engine", "wrapped"]
)
def test_what_the_program_lets_go_of_is_free(
    attached: Attach, client: ModuleType, monkeypatch: pytest.MonkeyPatch, wrap: Callable[..., Any]
) -> None:
    """A program may train one model after the other. All steps are found, whatever address the next has."""
    alive = []

    def loop(losses: list[float]) -> None:
        for _ in range(5):
            model = torch.nn.Linear(4, 4)
            stepper = wrap(torch.optim.SGD(model.parameters(), 0.1))
            for batch in client.batches(STEPS):
                model(batch[:, :4]).square().mean().backward()
                stepper.step()
            refs = [weakref.ref(one) for one in (stepper, model, model.weight)]
            del model, stepper
            gc.collect()
            alive.append([held() is not None for held in refs])

    monkeypatch.setattr(client, "one_after_the_other", loop, raising=False)
    result = attached("one_after_the_other")
    assert alive == 5 * [[False] * 3]
    assert [step.global_step for step in result.steps] == list(range(5 * STEPS))


@pytest.mark.heavy
def test_a_compiled_replica_is_compiled_as_without(
    attached: Attach, client: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop(losses: list[float]) -> None:
        model = client.ddp()
        optimizer, compiled = torch.optim.SGD(model.parameters(), 0.1), torch.compile(model, backend="eager")
        for batch in client.batches(4):
            compiled(batch).square().mean().backward()
            optimizer.step()

    from torch._dynamo.convert_frame import input_codes  # takes a second to load

    def codes() -> list[str]:
        seen = [code for held in input_codes.seen if (code := held()) is not None]
        return sorted(
            code.co_qualname for code in seen if code.co_filename.endswith("parallel/distributed.py")
        )

    loop([])
    without = codes()
    torch._dynamo.reset()
    monkeypatch.setattr(client, "compiled_replica", loop, raising=False)
    attached("compiled_replica")
    assert codes() == without
    assert "DistributedDataParallel._lazy_init" in without


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "num_backwards"),
    [("plain", 1), ("two_optimizers", 4), ("sharded", 1), ("evaluating", 1), ("loading", 1)],
)
def test_steps_that_the_overhead_leaves_out_are_whole_though_they_cost_little(
    attached: Attach, client: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, num_backwards: int
) -> None:
    """Most of them end and begin on the short way; each has its place, its times and what its host did."""
    num_short: list[bool] = []
    goes_on = OpenSteps.goes_on

    def counted(*args: Any) -> bool:
        num_short.append(goes_on(*args))
        return num_short[-1]

    monkeypatch.setattr(OpenSteps, "goes_on", counted)
    monkeypatch.setattr(client, "STEPS", 120)
    result = attached(kind, overhead="0.001%")
    left_out = [step for step in result.steps if not step.is_recorded]
    assert [step.global_step for step in result.steps] == list(range(120))
    assert len(left_out) > 80
    assert sum(num_short) > 60 or kind == "evaluating"
    assert result.run.samples_per_step == 4  # noted in single steps
    for step in left_out[:-1]:
        spans = step.host_spans or []
        assert sum(span.kind == "backward" for span in spans) == num_backwards
        assert all(-1.0 < span.start_ms <= span.end_ms < (step.step_ms or 0.0) + 1e-3 for span in spans)
        assert step.host_use is not None
        assert step.instrument_ms is not None
    if kind != "evaluating":
        for step, following in pairwise(left_out):
            is_next = following.global_step == step.global_step + 1
            assert not is_next or abs(following.start_unix_ns - step.end_unix_ns) < 2_000


@pytest.mark.heavy
def test_a_program_of_one_iteration_has_one_step(attached: Attach) -> None:
    result = attached("one_iteration")
    assert [step.global_step for step in result.steps] == [0]
    assert "SGD.step + torch.optim.sgd.SGD.step" in result.run.coverage["steps_at"]


@pytest.mark.heavy
def test_replays_of_a_graph_that_holds_the_optimizer_are_steps(
    attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = dict.fromkeys(("capture_begin", "capture_end", "replay"), lambda self: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", type("CUDAGraph", (), calls))
    result = attached("graphed")
    assert [step.global_step for step in result.steps] == list(range(STEPS))
    assert result.run.coverage["steps_at"] == "torch.optim.sgd.SGD.step"
    assert result.collectives[2:] == [1, 0, 0, 0]


@pytest.mark.heavy
def test_collectives_of_a_checkpoint_that_a_thread_saves_are_in_no_step(attached: Attach) -> None:
    result = attached("saved_in_background")
    assert set(result.collectives[2:]) == {1}
    assert result.run.coverage["outside_step"] == {"barrier": STEPS}


def test_a_checked_loop_computes_the_same(attached: Attach, client: ModuleType, tmp_path: Path) -> None:
    """Its windows begin and end within the optimizer's hooks, where torch allows no change of them."""
    checked = attached("plain", check_every=2).losses
    torch.manual_seed(0)
    bare: list[float] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/again", rank=0, world_size=1)
    client.plain(bare)
    assert checked == bare
    (found,) = read_checked(tmp_path / "run")
    assert len(found.steps) >= 2
    assert found.num_operations > 0
    assert found.findings == []
    assert found.num_compared > 0


@pytest.mark.heavy
def test_losses_are_those_of_the_script_alone(attached: Attach, client: ModuleType, tmp_path: Path) -> None:
    with_aorta = attached("plain").losses
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1)
    torch.manual_seed(0)
    alone: list[float] = []
    client.plain(alone)
    assert with_aorta == alone


@pytest.mark.heavy
def test_collectives_of_an_evaluation_are_in_no_step(attached: Attach) -> None:
    result = attached("evaluating")
    assert sum(result.run.coverage["outside_step"].values()) == 2 * 3  # two evaluations of three batches


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "num_outside", "evaluated_steps"),
    [
        pytest.param("evaluating", 2, [], id="now-and-then-in-no-step"),
        pytest.param("evaluated_each_time", 2, [3, 4, 5], id="part-of-the-loop"),
        pytest.param("without_gradients", 0, [2, 5], id="batches-without-gradients"),
    ],
)
def test_an_evaluation_is_seen_though_nobody_announces_it(
    attached: Attach, kind: str, num_outside: int, evaluated_steps: list[int]
) -> None:
    result = attached(kind)
    assert [step.global_step for step in result.steps] == list(range(STEPS))
    assert result.run.coverage.get("evaluations", {"times": 0})["times"] == num_outside
    spans = {step.global_step: step.host_spans or [] for step in result.steps}
    paused = [number for number, of_step in spans.items() if any(one.kind == "pause" for one in of_step)]
    assert paused == evaluated_steps


@pytest.mark.heavy
def test_an_iteration_that_keeps_parts_in_evaluation_is_a_step(attached: Attach) -> None:
    """The first one that is recognised is in none; what loads its batch belongs to each one that follows."""
    result = attached("frozen")
    assert len(result.steps) == 2 * STEPS - 1
    assert "evaluations" not in result.run.coverage
    for step in result.steps[3:-1]:
        kinds = [span.kind for span in step.host_spans or [] if span.kind != "garbage_collection"]
        assert kinds == ["data", "backward", "optimizer"]


@pytest.mark.heavy
def test_what_follows_the_optimizer_is_the_same_steps(attached: Attach) -> None:
    result = attached("loading")
    # Known from the third step on: logging of the second one is still in the window of the third.
    assert result.collectives[2:] == [2, 2, 1, 2]
    assert sum(result.run.coverage["outside_step"].values()) == 3
    assert all(step.between_steps_ms for step in result.steps[2:5])


@pytest.mark.heavy
def test_an_optimizer_that_is_not_torchs_is_found_by_the_collectives(
    attached: Attach, client: ModuleType
) -> None:
    client.STEPS = 3 * STEPS
    try:
        result = attached("own_optimizer")
    finally:
        client.STEPS = STEPS
    assert result.run.coverage["steps_at"] == "every 2 backward passes, by the pattern of collectives"
    assert len(result.steps) == 3 * STEPS
    assert set(result.collectives[2:]) == {1}


@pytest.mark.heavy
def test_a_loop_without_an_optimizer_has_a_step_for_each_iteration(attached: Attach) -> None:
    result = attached("functional")
    assert result.run.coverage["steps_at"] == "every backward pass, as no optimizer is called"
    assert len(result.steps) == 2 * STEPS
    assert set(result.collectives[1:]) == {1}
    paused = [any(span.kind == "pause" for span in step.host_spans or []) for step in result.steps]
    assert paused == [number == 2 * STEPS - 2 for number in range(2 * STEPS)]


@pytest.mark.heavy
def test_a_remote_optimizers_calls_are_the_steps(
    attached: Attach, client: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RPC's: its backward passes run in C++, and what it steps is scripted."""
    module = ModuleType("torch.distributed.optim.optimizer")
    monkeypatch.setattr(module, "DistributedOptimizer", client.Remote, raising=False)
    import_torch = hooks.Attachment._install

    def install(self: hooks.Attachment, torch: ModuleType) -> None:
        import_torch(self, torch)
        self.imported(module.__name__, module)

    monkeypatch.setattr(hooks.Attachment, "_install", install)
    result = attached("remote")
    assert [step.global_step for step in result.steps] == list(range(STEPS))
    assert result.collectives == [1] * STEPS
    assert result.run.coverage["steps_at"] == "attach_client.Remote.step"


def test_an_exit_without_handlers_closes_the_records(
    attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    attachment = hooks.Attachment(AttachSettings(output="nowhere"))
    closed: list[int] = []
    monkeypatch.setattr(attachment, "_process_ends", lambda: closed.append(len(statuses)))
    attachment._watch_exit()
    try:
        os._exit(1)  # a watchdog's: not waited for
        os._exit(0)
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()
    finally:
        attachment.detach()
    assert statuses == [1, 0, 0]
    assert closed == [1]


def test_the_evaluation_of_a_model_with_an_eval_of_its_own_is_seen(attached: Attach) -> None:
    """As that of transformers, which calls train(False)."""

    class Pretrained(torch.nn.Module):
        def eval(self) -> "Pretrained":
            return self.train(False)

    told: list[int] = []
    attachment = hooks.Attachment(AttachSettings(output="nowhere"))
    attachment.session = SimpleNamespace(evaluation_begins=told.append)
    attachment.imported("transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Pretrained))
    model = Pretrained()
    try:
        assert not model.eval().training
        model.eval()  # it does so already
    finally:
        attachment.session = None
        attachment.detach()
    assert told == [id(model)]
    assert Pretrained.eval.__name__ == "eval"


def test_a_forked_process_is_watched_unless_its_parent_trains(
    attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    attachment = hooks.Attachment(AttachSettings(output="nowhere"))
    monkeypatch.setattr(hooks, "attachment", attachment)
    attachment.pid = parent = 1
    hooks.forked()
    assert attachment.pid == os.getpid()
    attachment.pid, attachment.session = parent, object()
    hooks.forked()
    assert attachment.pid == parent


@pytest.mark.heavy
def test_a_function_can_be_named(attached: Attach) -> None:
    result = attached("named_step", step_at="attach_client:train_step")
    assert len(result.steps) == STEPS
    assert result.run.coverage["steps_at"] == "calls of attach_client:train_step"


@pytest.mark.heavy
def test_a_script_with_a_recorder_of_its_own_wins(
    attached: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OWN_OUTPUT", str(tmp_path / "own"))
    with pytest.raises(FileNotFoundError):
        attached("own_aorta")
    steps = (tmp_path / "own" / "rank_0_metrics.jsonl").read_text().splitlines()
    assert len(steps) == STEPS
    assert all('"optimizer"' in step for step in steps)
    assert not (tmp_path / "run" / "run.json").exists()
    assert "the program records itself with aorta" in capfd.readouterr().err


@pytest.mark.heavy
def test_what_fails_takes_the_instrument_off_and_not_the_script(
    attached: Attach, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from aorta.attach.session import AttachedSession

    def broken(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(AttachedSession, "optimizer_ended", broken)
    with pytest.raises(FileNotFoundError):  # nothing was recorded
        attached("plain")
    assert capfd.readouterr().err.count("ValueError: planted; recording ends here, the program goes on") == 1


@pytest.mark.heavy
def test_a_run_that_an_error_of_aortas_own_ends_has_not_crashed(
    attached: Attach, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from aorta.attach.session import AttachedSession

    ended = AttachedSession.optimizer_ended

    def broken(session: AttachedSession, *given: Any) -> None:
        if session._num_steps == 3:
            raise ValueError("planted")
        ended(session, *given)

    monkeypatch.setattr(AttachedSession, "optimizer_ended", broken)
    result = attached("plain")
    assert len(result.losses) == STEPS
    (attempt,) = result.run.attempts
    assert attempt.ending is not None
    assert ending_text(attempt.ending) == (
        "stopped by an error of aorta's own, behind which the program went on: ValueError: planted"
    )


def test_what_watches_the_end_of_the_process_is_taken_off(tmp_path: Path) -> None:
    before = sys.excepthook, os._exit
    attachment = hooks.Attachment(AttachSettings(output=str(tmp_path)))
    attachment.imported("torch", torch)
    assert sys.excepthook is not before[0]
    assert os._exit is not before[1]
    attachment.detach()
    assert (sys.excepthook, os._exit) == before


def test_what_ends_a_program_is_known_whatever_hook_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from aorta.attach import session

    error = ValueError("planted")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    assert session._uncaught() is error
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert session._uncaught() is None


@pytest.mark.heavy
def test_a_session_that_is_taken_off_closes_its_sinks(
    client: ModuleType, group: None, tmp_path: Path
) -> None:
    """The steps before are there, and the thread of the sinks is gone."""
    attachment = hooks.Attachment(
        AttachSettings(output=str(tmp_path / "run"), sinks=[f"tensorboard={tmp_path}/tb"])
    )
    attachment.imported("torch", torch)
    client.plain([])
    attachment.take_off("planted")
    assert not [thread for thread in threading.enumerate() if thread.name == "aorta-sinks"]
    written = len((tmp_path / "run" / "rank_0_metrics.jsonl").read_bytes().splitlines())
    assert len(scalars_in(tmp_path / "tb")["aorta/step_ms"]) == written > 0


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every scalar, by tag."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard (extra report)"
    )
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_a_hook_on_one_of_autograds_threads_is_of_the_thread_that_called_backward() -> None:
    """Those threads are none of Python's: _thread starts such ones."""
    attachment = hooks.Attachment(AttachSettings(output="unused"))
    attachment.backward_thread = threading.get_ident()
    told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def ask() -> None:
        told.put((attachment.training_thread(), threading.get_ident()))

    _thread.start_new_thread(ask, ())
    assert told.get()[0] == threading.get_ident()
    beside = threading.Thread(target=ask)
    beside.start()
    beside.join()
    found, own = told.get()
    assert found == own
