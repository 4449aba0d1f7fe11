"""The workloads, one file each; a new file with a subclass of Workload is found by itself.

Beside them lies what several are made of: how work gets onto streams (ordering), inputs, checks and stated
work (inputs_and_checks), and collectives (communication).
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType

from aorta.errors import ConfigError, did_you_mean
from aorta.queues.workload import Workload


@functools.cache
def workloads() -> Mapping[str, type[Workload]]:
    """Workloads by name, sorted by priority and name. Raises if a module does not import."""
    return collect(_modules(importlib.import_module("aorta.queues.workloads")))


def _modules(package: ModuleType) -> Iterable[ModuleType]:
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        yield importlib.import_module(module.name)


def collect(modules: Iterable[ModuleType]) -> dict[str, type[Workload]]:
    """The workloads that these modules define (not those that they import)."""
    classes: dict[str, type[Workload]] = {}
    for module in modules:
        for value in vars(module).values():
            if not (inspect.isclass(value) and issubclass(value, Workload)) or inspect.isabstract(value):
                continue
            if value.__module__ != module.__name__:
                continue
            previous = classes.get(value.name)
            assert previous is None, f"two workloads are named {value.name}: {previous} and {value}"
            classes[value.name] = value
    order = sorted(classes.values(), key=lambda workload: (workload.priority, workload.name))
    return {workload.name: workload for workload in order}


def find(name: str) -> type[Workload]:
    """ConfigError with the nearest name for one that there is not."""
    names = workloads()
    if name in names:
        return names[name]
    part_of = [candidate for candidate in names if name and name in candidate]
    otherwise = f", did you mean '{part_of[0]}'?" if part_of else f"; there is {', '.join(names)}"
    raise ConfigError(f"{name} is not a workload{did_you_mean(name, names, otherwise)}")
