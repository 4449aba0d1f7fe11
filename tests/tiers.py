"""Which tests start processes or go by the clock: scripts/test.sh fast leaves them out.

Read from the code of each test, its fixtures and the helpers that they call, so that nobody has to keep a
list. What the package starts on its own account is not seen there: such a test is marked by hand, and
fails in the fast tier where it is not (`ProcessWatch`).
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

PROCESS_MODULES = frozenset({"subprocess", "multiprocessing", "concurrent.futures.process", "pty"})
CLOCKS = frozenset({"sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"})
PROCESS_CALLS = frozenset({"fork", "spawnv", "posix_spawn", "forkpty", "system", "kill"})

WAIT = (
    "hang/test_watchdog.py",
    "attach/test_instrument.py",
    "device/native/test_kernel_records_library.py",
    "test_imports.py",
)
"""Modules that wait for more than they compute: first, while mypy (scripts/test.sh) takes what they leave."""
LONGEST = (
    "page/test_page_in_browser.py",
    "training/test_runs.py",
    "cli/test_endings.py",
    "record/test_recorder.py",
    "record/test_loader_workers.py",
    "account/judge/test_compare.py",
    "training/parallel/test_forms_match_one_process.py",
    "training/test_command.py",
    "training/test_checkpoint.py",
    "programs/test_executor.py",
    "timeline/test_sequences.py",
    "benchmarks/test_projection_validate.py",
    "attach/test_let_go.py",
    "test_scripts.py",
    "account/load/test_columns_beside_lines.py",
    "test_wheel.py",
    "scripts_capture/test_capture_scripts.py",
    "device/native/test_kernel_sources.py",
    "attach/test_loops.py",
    "account/judge/test_gate.py",
    "queues/cli/test_cli.py",
    "why/causes/test_code_lines.py",
    "attach/test_flops.py",
    "record/test_sampling.py",
    "why/causes/test_on_device.py",
    "benchmarks/test_attached_cost.py",
    "attach/test_bootstrap.py",
    "record/test_learned_calls.py",
    "benchmarks/test_remedies.py",
    "account/judge/test_occasional.py",
    "check/test_fsdp2_orders.py",
    "projection/test_anchor.py",
    "training/test_stop.py",
    "account/load/test_ways_to_read.py",
    "queues/cli/test_profile.py",
    "test_requirements.py",
    "page/test_output_folder.py",
    "projection/test_whatif.py",
    "traces/test_known_traces.py",
    "traces/test_damaged_traces.py",
    "record/test_overhead.py",
    "benchmarks/test_unseen_rows.py",
    "why/causes/test_planted.py",
    "cli/test_gate.py",
    "account/test_report.py",
    "traces/test_sources.py",
    "attach/test_program.py",
    "cli/test_commands.py",
)
"""Modules that take over five seconds of CPU with the processes they start."""
FIRST = {module: turn for turn, module in enumerate(WAIT + LONGEST)}
"""The order in which workers take these; the others come after them, so that none is left over at the end."""


def leaves_the_process(functions: list[Callable[..., Any]]) -> bool:
    """True if one of these, or what they call below tests/, starts a process, sleeps or reads a clock."""
    seen: set[types.FunctionType] = set()
    waiting = [inner for function in functions for inner in _functions_of(function)]
    while waiting:
        function = waiting.pop()
        if function not in seen:
            seen.add(function)
            leaves, called = _calls(function)
            if leaves:
                return True
            waiting += called
    return False


@functools.cache
def _calls(function: types.FunctionType) -> tuple[bool, list[types.FunctionType]]:
    """True if the function itself leaves the process; what it calls below tests/. Cached: thousands of tests
    share fixtures and helpers."""
    names = frozenset(_names(function.__code__))
    called: list[Any] = []
    for value in _values(function, names):
        if isinstance(value, types.ModuleType):
            if _is_outside(value.__name__, names):
                return True, []
            if value.__name__.startswith("tests."):
                called += [getattr(value, name) for name in names if hasattr(value, name)]
        elif _is_outside(getattr(value, "__module__", None) or "", names):
            return True, []
        elif (getattr(value, "__module__", None) or "").startswith("tests."):
            called.append(value)
    return False, [inner for value in called for inner in _functions_of(value)]


def _is_outside(module: str, names: frozenset[str]) -> bool:
    return (
        any(module == name or module.startswith(f"{name}.") for name in PROCESS_MODULES)
        or (module == "time" and bool(names & CLOCKS))
        or (module in ("os", "posix") and bool(names & PROCESS_CALLS))
    )


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """The function behind decorators and fixtures, or a class's methods."""
    for name in ("_get_wrapped_function", "__pytest_wrapped__"):  # a fixture, by version of pytest
        if wrapped := getattr(value, name, None):
            value = wrapped() if callable(wrapped) else wrapped.obj
            break
    if inner := getattr(getattr(value, "hypothesis", None), "inner_test", None):
        value = inner
    if inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.startswith("tests."):
                for member in vars(base).values():
                    yield from _functions_of(
                        getattr(member, "fget", None) or getattr(member, "__func__", member)
                    )
        return
    value = inspect.unwrap(value) if callable(value) else value
    value = getattr(value, "__func__", value)
    if isinstance(value, types.FunctionType):
        yield value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _values(function: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """What the function's global names stand for, and what its closure holds."""
    for name in names:
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


class ProcessWatch:
    """Notes processes that this interpreter starts; of any thread, from `start` on."""

    EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})

    def __init__(self) -> None:
        self.started: list[str] = []
        self._watches = False

    def start(self) -> None:
        if not self._watches:
            self._watches = True
            sys.addaudithook(self._note)  # for good: hooks cannot be taken off

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in self.EVENTS:  # each import and each open file is an event
            return
        # A run asks git for its commit, in milliseconds.
        if not (arguments and str(arguments[0]).endswith("git")):
            self.started.append(f"{event} {str(arguments[:2])[:200]}")
