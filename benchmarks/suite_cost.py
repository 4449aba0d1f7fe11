"""CPU seconds of every test with all processes that it starts, ranks that nobody waits for and browsers too.

AORTA_SUITE_COST=FOLDER python -m pytest -p benchmarks.suite_cost [-n 2 --dist loadscope] [TESTS]
python benchmarks/suite_cost.py FOLDER [--output FILE]     # a table by module, and JSON

Each worker moves itself into a cgroup of its own (version 2, also beside version 1: cpu.stat counts every
process that was ever in it), which needs root. A fixture is part of the first test that asks for it, and the
server that ranks are forked from, some 6 s, of the first that has ranks.
"""

import argparse
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOTS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
VARIABLE = "AORTA_SUITE_COST"
MEASURED = "AORTA_SUITE_COST_MEASURED"
"""Set for what a worker starts: a test that runs pytest is part of that test."""


class Cost:
    """Writes a line for collection and for each phase of a test: CPU and wall seconds."""

    def __init__(self, folder: Path, worker: str) -> None:
        root = next(root for root in ROOTS if (root / "cgroup.procs").exists())
        group = root / f"aorta-suite-{os.getpid()}"
        group.mkdir()
        (group / "cgroup.procs").write_text(str(os.getpid()))
        self._usage = group / "cpu.stat"
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / f"{worker}.jsonl").open("w", buffering=1)

    def _cpu_s(self) -> float:
        return int(self._usage.read_text().split()[1]) / 1e6  # usage_usec N

    def _write(self, **values: object) -> None:
        self._lines.write(json.dumps(values) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write(test="collection", when=str(len(session.items)), cpu_s=self._cpu_s())

    def pytest_sessionfinish(self) -> None:
        self._write(test="all", when="end", cpu_s=self._cpu_s(), load=os.getloadavg())

    def _phase(self, item: pytest.Item, when: str) -> Iterator[None]:
        cpu_s, wall_s = self._cpu_s(), time.monotonic()
        yield
        wall_s = time.monotonic() - wall_s
        self._write(test=item.nodeid, when=when, cpu_s=self._cpu_s() - cpu_s, wall_s=wall_s)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "setup")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "call")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield from self._phase(item, "teardown")


def pytest_configure(config: pytest.Config) -> None:
    is_controller = config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")
    if MEASURED in os.environ or is_controller:
        return
    os.environ[MEASURED] = "1"
    worker = os.environ.get("PYTEST_XDIST_WORKER", "one")
    config.pluginmanager.register(Cost(Path(os.environ[VARIABLE]), worker))


def summary(folder: Path) -> dict[str, Any]:
    """Per worker its collection and end, per module its tests and CPU seconds, the costliest first."""
    workers: dict[str, dict[str, Any]] = {}
    modules: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for path in sorted(folder.glob("*.jsonl")):
        ends = workers.setdefault(path.stem, {})
        for line in map(json.loads, path.read_text().splitlines()):
            module, _, test = line["test"].partition("::")
            if not test:
                ends[module] = {name: value for name, value in line.items() if name != "test"}
                continue
            modules[module] += line["cpu_s"]
            tests[module].add(test)
    costly = sorted(modules, key=lambda module: -modules[module])
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "workers": workers,
        "tests_cpu_s": round(sum(modules.values()), 1),
        "modules": {
            module: {"tests": len(tests[module]), "cpu_s": round(modules[module], 1)} for module in costly
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cost = summary(arguments.folder)
    for module, of_module in list(cost["modules"].items())[:40]:
        print(f"{of_module['cpu_s']:8.1f} s {of_module['tests']:5d}  {module}")
    print(f"{cost['tests_cpu_s']:8.1f} s in all, workers: {cost['workers']}")
    if arguments.output:
        arguments.output.write_text(json.dumps(cost, indent=1) + "\n")


if __name__ == "__main__":
    main()
