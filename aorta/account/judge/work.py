"""Whether the steps of two runs hold the same work, and what leads a comparison where they do not."""

from aorta.account.metrics import RATES, WORK
from aorta.account.model import Dataset, StepWork
from aorta.account.numbers import number, times

PER_GPU, IN_ALL = RATES[0], RATES[1]
SAME_WORK = 0.01
"""Part by which the tokens of a step may differ and still count as the same: batches are packed."""


def unequal_work(reference: Dataset, candidate: Dataset) -> StepWork | None:
    """Tokens of a GPU's step on both sides; None where they are equal or not known."""
    tokens = [_tokens_of_gpu(side) for side in (reference, candidate)]
    if tokens[0] is None or tokens[1] is None or abs(tokens[1] / tokens[0] - 1) <= SAME_WORK:
        return None
    return StepWork(tokens[0], tokens[1])


def work_text(work: StepWork, step_ratio: float | None) -> str:
    """'a step of it holds 8 times the tokens and takes 4.74 times as long'."""
    text = f"its step holds {times(work.ratio)} the tokens"
    return text if step_ratio is None else f"{text} and takes {times(step_ratio)} as long"


def work_notes(reference: Dataset, candidate: Dataset, work: StepWork | None) -> list[str]:
    """Notes on the work of the two sides."""
    if work is not None:
        sides = f"{reference.label}: {number(work.reference)}, {candidate.label}: {number(work.candidate)}"
        return [
            f"steps hold different amounts of work (tokens per GPU: {sides}): tokens/s per GPU is judged,"
            " not step time, and times of a step are called different, neither better nor worse"
        ]
    unknown = [side.label for side in (reference, candidate) if _tokens_of_gpu(side) is None]
    layouts = [_work_of_layout(side) for side in (reference, candidate)]
    if unknown and None not in layouts and layouts[0] != layouts[1]:
        return [
            f"the batches differ ({' and '.join(map(str, layouts))} tokens of a step in the layouts) and"
            f" {' and '.join(unknown)} recorded no tokens: these step times are of different amounts of work"
        ]
    return []


def rate_text(name: str) -> str:
    """'tokens/s per GPU'"""
    return {PER_GPU: "tokens/s per GPU", IN_ALL: "tokens/s"}.get(name, name)


def _tokens_of_gpu(side: Dataset) -> float | None:
    statistic = side.statistics.get(WORK)
    if statistic is None or not statistic.median:
        return None
    return statistic.median / len(side.first.ranks)


def _work_of_layout(side: Dataset) -> int | None:
    """Tokens of a rank's step as run.json's layout gives them."""
    run = side.first.record
    layout = run.layout if run is not None else None
    sizes = [(layout or {}).get(key) for key in ("mbs", "seq", "grad_accum")]
    if any(not isinstance(size, int) for size in sizes):
        return None
    product = 1
    for size in sizes:
        product *= size or 1
    return product
