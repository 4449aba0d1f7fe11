"""Who issues collectives: the line of the program above a call, what moves, and how rarely anybody looks."""

import inspect
import threading
from types import SimpleNamespace

import msgspec
import pytest

from aorta.record.sites import LOOKS_EVERY, MOST_CALLS, Sites
from aorta.records.reader import read_beside
from aorta.records.schema import CallSites
from aorta.steps.notes import CollectiveCall

LIBRARY = "/env/lib/site-packages/{}/{}.py"


@pytest.fixture
def journal():
    return SimpleNamespace(current=None, note_site=None)


@pytest.fixture
def sites(journal, tmp_path):
    made = Sites(journal)
    made.write_to(tmp_path / "sites.json")
    for _ in range(2):  # passed over: they connect
        made.begin_step(True)
    return made


def call(op="all_reduce", size=4, module=None):
    made = CollectiveCall(None, op, size, "float32", False)
    made.module = module
    return made


def library_function(name, package="torch", body="return inner(*args)"):
    """A function of a library, by its file; as a rule it calls what it is given."""
    scope = {}
    code = f"def {name}(inner, *args):\n    {body}"
    exec(compile(code, LIBRARY.format(package, "distributed"), "exec"), scope)
    return scope[name]


def told(sites, tmp_path, *calls):
    """Sites of a step in which each of `calls` notes one; the journal's hook is between."""
    sites.begin_step(True)
    for issue in calls:
        issue(sites._journal.note_site)
    sites.end_step()
    return read_beside(tmp_path / "sites.json", CallSites)


def test_the_line_of_the_program_above_a_call(sites, tmp_path):
    def mean_loss(note):
        library_function("all_reduce")(note, call())

    found = told(sites, tmp_path, mean_loss, mean_loss)
    (site,) = found.sites
    assert (site.file, site.line) == (__file__, inspect.getsourcelines(mean_loss)[1] + 1)
    assert site.function.endswith("mean_loss")
    assert (site.is_program, site.op, site.moves, site.num_calls, site.bytes) == (
        True,
        "all_reduce",
        "a value",
        2,
        8,
    )
    assert found.num_steps == 1


@pytest.mark.parametrize(
    ("function", "package", "made", "moves"),
    [
        ("all_gather_object", "torch", call("all_gather", 100), "an object"),
        ("_sync_buffers", "torch", call("broadcast", 4000), "buffers"),
        ("_get_total_norm", "torch", call(), "the norm of gradients"),
        ("compute", "torchmetrics", call("all_gather", 100), "a metric"),
        ("_engine_run_backward", "torch", call(module="bucket 0: head"), "gradients, bucket 0: head"),
        ("_engine_run_backward", "torch", call("all_reduce", 1 << 20), "gradients"),
        ("unshard", "torch", call("all_gather", 1 << 20, "layers.3"), "parameters of layers.3"),
        ("all_reduce", "torch", call("all_reduce", 1 << 20), "a tensor"),
    ],
)  # fmt: skip
def test_what_moves_is_told_by_functions_and_names(sites, tmp_path, function, package, made, moves):
    found = told(sites, tmp_path, lambda note: library_function(function, package)(note, made))
    assert [site.moves for site in found.sites] == [moves]


def test_a_backward_pass_in_autograd_s_thread_is_of_the_line_that_waits_for_it(sites, tmp_path, journal):
    journal.current = SimpleNamespace(thread=threading.get_ident())
    when = library_function("run_backward", body="inner.wait(); return args[0](*args[1:])")
    enter = library_function("_engine_run_backward", body="inner.set(); return args[0]()")
    is_there = threading.Event()

    def backward(note):
        made = call("all_reduce", 1 << 20)
        thread = threading.Thread(target=when, args=(is_there, note, made))
        thread.start()
        enter(is_there, thread.join)

    (site,) = told(sites, tmp_path, backward).sites
    assert (site.is_program, site.moves) == (True, "gradients")
    assert site.function.endswith("backward")


def test_few_steps_are_looked_at_and_a_step_s_calls_are_bounded(sites, journal, tmp_path):
    num = 0
    for _ in range(4 * LOOKS_EVERY):
        sites.begin_step(True)
        num += journal.note_site is not None
        if journal.note_site is not None:
            for _ in range(MOST_CALLS + 5):
                journal.note_site(call())
        sites.end_step()
    assert num <= 16
    assert (
        sum(site.num_calls for site in read_beside(tmp_path / "sites.json", CallSites).sites)
        <= num * MOST_CALLS
    )


def test_what_comes_every_tenth_step_is_found(sites, journal, tmp_path):
    """After it was missed once, steps are looked at until it comes again, and then no more."""
    rare, num_looks = call("all_gather", 100), []
    for number in range(80):
        sites.begin_step(True)
        calls = [call(), rare] if number % 10 == 9 else [call()]
        num_looks.append(journal.note_site is not None)
        for each in calls if journal.note_site is not None else ():
            journal.note_site(each)
        sites.end_step(calls)
    assert {site.op for site in read_beside(tmp_path / "sites.json", CallSites).sites} == {
        "all_reduce",
        "all_gather",
    }
    assert sum(num_looks) <= 18
    assert not any(num_looks[31:62])


def test_no_step_is_looked_at_that_is_not_seen(sites, journal):
    sites.begin_step(False)
    assert journal.note_site is None


def test_a_step_that_is_dropped_tells_nothing(sites, journal, tmp_path):
    sites.begin_step(True)
    journal.note_site(call())
    sites.leave_step()
    sites.end_step()
    assert read_beside(tmp_path / "sites.json", CallSites) is None


def test_no_argument_and_no_local_is_kept(sites, tmp_path):
    def step(note, secret="swordfish"):
        note(call())

    assert b"swordfish" not in msgspec.json.encode(told(sites, tmp_path, step))
