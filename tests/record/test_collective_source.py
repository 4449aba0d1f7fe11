"""When the collective library's events are on, and what run.json says of them."""

import sys

import pytest

import aorta
from aorta.cli import run as run_module
from aorta.device.collective_events import LibraryEventsUnavailable
from aorta.errors import InstrumentError
from aorta.record import collective_source
from aorta.record.collective_source import NOT_ASKED_FOR, NOT_LOADED, CollectiveSource
from aorta.records.reader import read_run


class Events:
    """Stands in for the plugin's memory."""

    def __init__(self, version: int = 5) -> None:
        self.version, self.num_communicators, self.num_names = version, 2, 1
        self.complete_ns, self.num_lost = 77, 0
        self.is_on = False
        self.parts = [b"one", b"two"]
        self.given_up_ns: list[int] = []

    def record(self, wanted: bool) -> None:
        self.is_on = wanted

    def take(self, given_up_ns: int) -> bytes:
        self.given_up_ns.append(given_up_ns)
        return self.parts.pop(0) if self.parts else b""

    def names(self, first: int, end: int) -> list[str]:
        return [""] * (end - first)


@pytest.fixture
def events(monkeypatch):
    made = Events()
    monkeypatch.setattr(collective_source, "open_events", lambda: made)
    return made


def test_events_of_recorded_steps_are_kept_and_no_others(events):
    source = CollectiveSource("plugin")
    on = [(source.begin_step(number % 3 == 0), events.is_on) for number in range(5)]
    assert on == [(True, True), (False, False), (False, False), (True, True), (False, False)]


def test_nothing_is_recorded_while_a_graph_is_captured_or_the_recorder_rests(events):
    source = CollectiveSource("plugin")
    source.begin_step()
    states = [events.is_on]
    for num_open in (1, 2, 1, 0):
        source.capturing(num_open)
        states.append(events.is_on)
    assert states == [True, False, False, False, True]
    source.sleep()
    assert not events.is_on
    assert not source.begin_step()
    source.wake()
    assert source.begin_step()
    assert events.is_on


def test_a_poll_takes_everything_and_names_once(events):
    source = CollectiveSource("plugin")
    first, second = source.poll(), source.poll(closing=True)
    assert (first.events, first.names, first.complete_ns) == (b"onetwo", [""], 77)
    assert (second.events, second.names) == (b"", [])
    assert events.given_up_ns[-1] > events.given_up_ns[0]  # when closing, nothing is waited for


def test_without_the_plugin_there_is_a_reason_and_nothing_else(monkeypatch):
    def refuse():
        raise LibraryEventsUnavailable("NCCL_PROFILER_PLUGIN names another profiler, /opt/inspector.so")

    monkeypatch.setattr(collective_source, "open_events", refuse)
    source = CollectiveSource("plugin")
    assert not source.begin_step()
    assert source.poll() is None
    assert source.described(had_communicators=True) == {
        "reason": "NCCL_PROFILER_PLUGIN names another profiler, /opt/inspector.so"
    }


def test_a_library_that_has_not_loaded_it_is_told_from_one_that_was_not_used(events):
    source = CollectiveSource("plugin")
    assert source.described(True)["times"] == "device"
    events.version = 0
    assert source.described(True) == {"reason": NOT_LOADED}
    assert source.described(False) == {"reason": "no communicator of NCCL or RCCL was made"}


def test_it_is_off_unless_asked_for(tmp_path):
    assert CollectiveSource("calls").described(True) == {"reason": NOT_ASKED_FOR}
    with pytest.raises(InstrumentError, match="collectives must be 'learned', 'calls' or 'plugin'"):
        aorta.instrument(tmp_path, collectives="nccl")


@pytest.mark.processes
@pytest.mark.heavy
def test_run_json_says_why_there_are_none_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "")  # put back after the test, whatever sets it
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN")
    with aorta.instrument(tmp_path, device="cpu", collectives="plugin") as recorder, recorder.step():
        pass
    events = read_run(tmp_path).coverage["library_events"]
    assert events == {"reason": "no communicator of NCCL or RCCL was made", "matched": None}


@pytest.mark.processes
@pytest.mark.parametrize("chosen", [None, "/opt/inspector.so"])
def test_aorta_run_names_the_plugin_for_its_command_unless_another_is(tmp_path, monkeypatch, capsys, chosen):
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", "")  # put back after the test, whatever sets it
    monkeypatch.delenv("NCCL_PROFILER_PLUGIN")
    if chosen:
        monkeypatch.setenv("NCCL_PROFILER_PLUGIN", chosen)
    seen = {}
    monkeypatch.setattr(
        run_module, "run_to_end", lambda command, environment, notes: seen.update(environment) or 0
    )
    run_module.run_command(
        ["-o", str(tmp_path), "--no-report", "--collectives", "plugin", sys.executable], standalone_mode=False
    )
    assert seen["NCCL_PROFILER_PLUGIN"] == chosen or "collective_events" in seen["NCCL_PROFILER_PLUGIN"]
    assert ("names another profiler" in capsys.readouterr().err) == (chosen is not None)
