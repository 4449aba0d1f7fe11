"""A measured step as anchor: the model keeps its structure and takes the user's stack from one run.

Terms that the records tell apart (GEMMs, attention, memory, exchange, host) become as long as they were
measured; what is left over, or all of it where only a step time is known, is one factor on the whole step.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

from aorta.config.yaml_files import read_yaml
from aorta.errors import ConfigError
from aorta.hardware.names import hardware_name_of
from aorta.hardware.part import Hardware, load_hardware
from aorta.projection.model import Model
from aorta.projection.plan import RATES, Plan
from aorta.projection.prices import Anchor, Pricer
from aorta.projection.step import Projection, project
from aorta.records.files import STEPS_FILES
from aorta.records.reader import read_run, read_steps
from aorta.records.schema import RunRecord, StepRecord

RUN = "run.json"
TERMS = {
    "gemm": (("gemm",), ("gemm",)),
    "attention": (("attention",), ("attention",)),
    "memory": (("normalization", "elementwise", "copy", "other"), ("elementwise", "fp8_cast", "fsdp_copy")),
}
"""By term: classes of measured kernels, and categories of projected operations."""
EXCHANGES = ("tp_comm", "ep_comm", "cp_comm", "dp_comm", "pp_comm")
LEAST_SHARE = 0.03
"""Share of a step from which on a term is told apart; a smaller one says little about the others."""
MOST = 4.0
"""A term that is further off than this was not the same work."""


class Measured(NamedTuple):
    """One measured step."""

    name: str
    step_s: float | None
    tokens_per_s_per_gpu: float | None = None
    kernels_s: Mapping[str, float] = {}
    """Sums of kernel times by class; {} where only the step is known."""
    exposed_s: float | None = None
    host_bound: bool = False
    tokens: int | None = None
    """Tokens of one rank and step."""
    run: RunRecord | None = None
    """None: a row of a file."""

    def of(self, plan: Plan) -> float:
        """Seconds of the step, whose plan was this one."""
        if self.step_s is not None:
            return self.step_s
        assert self.tokens_per_s_per_gpu is not None
        return plan.global_batch_size * plan.seq_len / self.tokens_per_s_per_gpu / plan.world_size


def read_measured(path: Path) -> Measured:
    """What a run's folder or a row's file says; ConfigError where neither holds a measured step."""
    if path.is_dir():
        return _of_run(path, tuple(sorted((file.name, file.stat().st_mtime_ns) for file in path.iterdir())))
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise ConfigError(
            f"--measured {path}: must be a run's folder, or a job file with {' or '.join(RATES)}"
        )
    given = {name: document[name] for name in RATES if document.get(name) is not None}
    if len(given) != 1:
        raise ConfigError(f"--measured {path}: needs one of {' and '.join(RATES)} beside the job's settings")
    ((name, value),) = given.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ConfigError(f"--measured {path}: {name} must be a number above 0, got {value!r}")
    if name == "step_ms":
        return Measured(path.name, float(value) / 1e3)
    return Measured(path.name, None, float(value))


@lru_cache(maxsize=4)
def _of_run(folder: Path, written: tuple[tuple[str, int], ...]) -> Measured:
    """What a run's folder says. written: its files and when, so that a sweep reads it once."""
    del written
    if not (folder / RUN).is_file():
        raise ConfigError(f"--measured {folder}: has no {RUN}; give a folder that `aorta run` left")
    run = read_run(folder)
    ranks = [_later_half(read_steps(path)) for path in sorted(folder.glob(STEPS_FILES))]
    ranks = [steps for steps in ranks if steps]
    if not ranks:
        raise ConfigError(f"--measured {folder}: has no measured steps")
    # All ranks wait for the slowest; its own kernels say what it did.
    steps = max(ranks, key=lambda steps: _median(step.step_ms for step in steps) or 0.0)
    with_kernels = [step for step in steps if step.kernels is not None]
    classes = {name for step in with_kernels for name in (step.kernels.classes if step.kernels else ())}
    kernels_s = {
        name: (
            _median(step.kernels.classes.get(name, (0.0, 0))[0] for step in with_kernels if step.kernels) or 0
        )
        / 1e3
        for name in classes
    }
    exposed_ms = _median(step.overlap.exposed_ms for step in with_kernels)
    idle_ms = _median(step.overlap.idle_ms for step in with_kernels)
    step_ms = _median(step.step_ms for step in steps)
    assert step_ms is not None
    return Measured(
        folder.name or str(folder),
        step_ms / 1e3,
        None,
        kernels_s,
        None if exposed_ms is None else exposed_ms / 1e3,
        idle_ms is not None and idle_ms > 0.1 * step_ms,
        next((step.tokens for step in steps if step.tokens), None),
        run,
    )


def _later_half(records: Iterable[StepRecord]) -> list[StepRecord]:
    """Measured steps of one rank and of the source that most have, without the first half."""
    steps = [step for step in records if step.step_ms is not None]
    counts = Counter(step.source for step in steps)
    steps = [step for step in steps if step.source == counts.most_common(1)[0][0]]
    return steps[len(steps) // 2 :]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def settings_of_run(measured: Measured, node: int, named: Collection[str] = ()) -> list[str]:
    """KEY=VALUE of what a record tells about its job beside what is named: part, nodes, GPUs of each."""
    run = measured.run
    assert run is not None
    settings = []
    if "gpu_arch" not in named:
        try:
            settings.append(f"gpu_arch={hardware_of_device(run).name}")
        except ConfigError as error:
            hint = "--measured-as gpu_arch=NAME names a part that it is like"
            raise ConfigError(f"--measured {measured.name}: {error}; {hint}") from None
    if {"nodes", "gpus_per_node"} <= set(named):
        return settings
    node = min(run.world_size, node)
    if run.world_size % node:
        raise ConfigError(f"--measured {measured.name}: {run.world_size} ranks do not fill nodes of {node}")
    return [*settings, f"nodes={run.world_size // node}", f"gpus_per_node={node}"]


def hardware_of_device(run: RunRecord) -> Hardware:
    """The hardware file whose name the device's name holds."""
    names = sorted({str(device.get("name")) for device in run.devices})
    for name in names:
        hardware_name = hardware_name_of(name)
        if hardware_name is not None:
            return load_hardware(hardware_name)
    raise ConfigError(f"ran on {', '.join(names) or 'no known device'}, which has no hardware file")


def anchored(measured: Measured, model: Model, plan: Plan, hardware: Hardware, pricer: Pricer) -> Anchor:
    """The anchor that makes the projection of the measured job what was measured.

    pricer: for the measured job, without an anchor.
    """
    projection = project(model, plan, pricer)
    terms = _terms(measured, projection)
    if terms:
        projection = project(
            model, plan, pricer.with_anchor(_anchor(measured, model, plan, hardware, terms, 1.0))
        )
    rest = measured.of(plan) / projection.step_s
    if not 1 / MOST < rest < MOST:
        took_ms, projected_ms = measured.of(plan) * 1e3, projection.step_s * 1e3
        raise ConfigError(
            f"--measured {measured.name}: took {took_ms:.1f} ms where {projected_ms:.1f} ms are projected; "
            "--measured-as KEY=VALUE says what else it ran with"
        )
    of_peak = _of_peak(measured.of(plan), projection)
    if of_peak > 1:
        raise ConfigError(
            f"--measured {measured.name}: took {measured.of(plan) * 1e3:.1f} ms, in which {model.name} would"
            f" do {of_peak * 100:.0f} % of the {plan.dtype} peak of {hardware.name}, so it ran something"
            " else; --measured-as KEY=VALUE says what, such as model=NAME"
        )
    return _anchor(measured, model, plan, hardware, terms, rest)


def _of_peak(step_s: float, projection: Projection) -> float:
    """Share of the data sheet's peak that the model's FLOPs are in a step of this length."""
    peak = projection.hardware.compute.peak_flops[projection.plan.dtype]
    return projection.model_flops_per_s * projection.step_s / step_s / peak


def _anchor(
    measured: Measured, model: Model, plan: Plan, hardware: Hardware, terms: Mapping[str, float], rest: float
) -> Anchor:
    return Anchor(measured.name, model, plan, hardware.name, dict(terms), rest)


def _terms(measured: Measured, projection: Projection) -> dict[str, float]:
    """Measured over projected time by category of operations, and of `host`, as far as both are known."""
    step_s = measured.of(projection.plan)
    factors: dict[str, float] = {}
    for classes, categories in TERMS.values():
        there = sum(measured.kernels_s.get(name, 0.0) for name in classes)
        here = sum(projection.breakdown_s.get(name, 0.0) for name in categories)
        _add(factors, categories, there, here, step_s)
    if measured.kernels_s and measured.exposed_s is not None:
        exposed = sum(s for name, s in projection.breakdown_s.items() if name.startswith("exposed_"))
        _add(factors, EXCHANGES, measured.exposed_s, exposed, step_s)
    if measured.host_bound and projection.host_s > LEAST_SHARE * step_s:
        _add(factors, ("host",), step_s, projection.host_s, step_s)
    return factors


def _add(
    factors: dict[str, float], categories: tuple[str, ...], there: float, here: float, step_s: float
) -> None:
    if min(there, here) > LEAST_SHARE * step_s:
        ratio = min(MOST, max(1 / MOST, there / here))
        factors |= dict.fromkeys(categories, ratio)
