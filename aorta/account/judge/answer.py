"""What a run loses, the largest loss first, in a sentence that tables and the page begin with."""

from dataclasses import dataclass

import numpy as np

from aorta.account.judge.alike import is_window
from aorta.account.judge.cells import CELLS, EXPOSED_CELLS, IDLE_CELLS, account_of
from aorta.account.judge.judged import looked_at, mean_of_runs, statistic
from aorta.account.judge.timed_steps import partly_timed
from aorta.account.load.evidence import comm_evidence
from aorta.account.load.measures import peak_text
from aorta.account.metrics import ENERGY, RATES
from aorta.account.model import Causes, Dataset, Run, Statistic
from aorta.account.numbers import number, percent, quantity
from aorta.account.rows import ratio

NOTED = 0.02
"""Part of the step from which a loss is named."""
PER_TIME = (*RATES, "samples_per_s", ENERGY)
LOSS_CELLS = {"exposed_ms": EXPOSED_CELLS, "idle_ms": ("copy", *IDLE_CELLS)}
LOSS_WORDS = {"exposed_ms": "exposed communication", "idle_ms": "idle"}


@dataclass(frozen=True, slots=True)
class Loss:
    """Time of a step in which the device computes nothing."""

    name: str
    """exposed_ms or idle_ms."""
    ms: float
    """Mean over the judged steps and ranks, as the account has it."""
    share: float | None
    """Of the mean step."""


def losses(dataset: Dataset) -> list[Loss]:
    """Losses that were measured, the largest first; of the first run, where there are several."""
    account = account_of(dataset.first)
    measured = [
        Loss(name, account.mean_ms(*cells), account.share(*cells))
        for name, cells in LOSS_CELLS.items()
        if account.is_measured and (account.on_device or name != "idle_ms")
    ]
    return sorted(measured, key=lambda loss: -loss.ms)


def dataset_answer(dataset: Dataset, causes: Causes | None = None) -> str:
    """'fsdp: data loading on rank 1: 20.1 ms a step, 38 % [19, 21] ms; ...': the largest cause; where there
    is none, or nobody looked for any, what the step loses: 'fsdp: a step takes 41.2 ms; 12 % of it is exposed
    communication, 3 % is idle; 59 % of communication is hidden'."""
    if causes is not None and causes.listed:
        return f"{dataset.label}: {causes.listed[0].headline}"
    return f"{dataset.label}: {losses_text(dataset)}"


def is_of_mean_step(dataset: Dataset, metric: str) -> bool:
    """Whether a metric, as it is read beside the step, is a mean: work per time is that of the steps that the
    step is the mean of, whose single ones tell nothing where the host runs ahead of its device."""
    return metric in PER_TIME and all(account_of(run).usual is None for run in dataset.runs)


def statistic_beside_step(dataset: Dataset, metric: str) -> Statistic | None:
    """A metric, as it is read beside the step; of several runs the mean of theirs."""
    found = dataset.statistics.get(metric)
    if found is None or found.median is None or not is_of_mean_step(dataset, metric):
        return found
    beside = mean_of_runs([_of_mean_step(looked_at(run), metric) for run in dataset.runs])
    return found if beside.median is None else beside


def statistics_beside_step(dataset: Dataset) -> dict[str, Statistic]:
    """All of its metrics so."""
    beside = {name: statistic_beside_step(dataset, name) for name in PER_TIME}
    return {**dataset.statistics, **{name: found for name, found in beside.items() if found is not None}}


def _of_mean_step(run: Run, metric: str) -> Statistic:
    values = run.values(metric)
    weights = np.ones_like(values) if metric == ENERGY else run.values("step_ms")
    is_known = np.isfinite(values) & np.isfinite(weights)
    sums = [np.sum(one, axis=1, where=is_known, keepdims=True) for one in (values * weights, weights)]
    return statistic(ratio(*sums))


def mfu_text(dataset: Dataset) -> str:
    """Text of the peak rate that MFU is a share of, with a warning where MFU cannot be right. '' where it is
    not known."""
    beside = statistic_beside_step(dataset, "mfu")
    mfu = None if beside is None else beside.median
    if mfu is None:
        return ""
    text = f"MFU: model FLOP/s over {peak_text(dataset.first.noted)}"
    if mfu <= 1:
        return text
    return (
        "warning: MFU is above 100 %: flops_per_token, tokens or the precision is not that of this run."
        f" {text}"
    )


def losses_text(dataset: Dataset) -> str:
    """'a step takes 41.2 ms; 12 % of it is exposed communication, 3 % is idle; 59 % of communication is
    hidden under compute': what is said where no cause is."""
    account = account_of(dataset.first)
    if not account.mean_step_ms > 0:
        return "step times were not measured"
    a_step = "a timed step" if partly_timed(dataset) and account.usual is None else "a step"
    a_step = "the whole trace" if is_window(dataset) else a_step
    return "; ".join([f"{a_step} takes {quantity(account.mean_step_ms, 'ms')}", *loss_texts(dataset, "it")])


def loss_texts(dataset: Dataset, whole: str) -> list[str]:
    """The same without how long a step takes. whole: what parts are of, 'it' or 'a step'."""
    account = account_of(dataset.first)
    if not account.mean_step_ms > 0:
        return []
    if account.contradiction:
        return [account.contradiction]
    if not account.is_measured:
        return ["overlap was not measured"]
    texts = []
    noted = [loss for loss in losses(dataset) if (loss.share or 0.0) >= NOTED]
    shares = [f"{percent(loss.share)} is {LOSS_WORDS[loss.name]}" for loss in noted]
    if shares:
        texts.append(", ".join([shares[0].replace(" is", f" of {whole} is", 1), *shares[1:]]))
    waiting = account.mean_ms("wait")
    if waiting > account.mean_ms(*EXPOSED_CELLS) / 2 and account.share("wait") >= NOTED:
        texts.append(f"{number(waiting)} ms of {whole} is {CELLS['wait'].title}")
    if account.comm_ms > 0:
        hidden = account.mean_ms("hidden") / account.comm_ms
        texts.append(f"{percent(hidden)} of communication is hidden under compute")
    elif doubt := comm_evidence(dataset.first).doubt:
        texts.append(doubt)
    return texts
