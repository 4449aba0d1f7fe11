"""Result of the probe, and the sentence that says how many queues there are and why."""

import msgspec

from aorta.queues.probe.machine import ProbeClock
from aorta.queues.probe.parts.blocking import Blocking
from aorta.queues.probe.parts.chain import Chains
from aorta.queues.probe.parts.convoy import Convoy
from aorta.queues.probe.parts.edges import QueueEdge
from aorta.queues.probe.parts.placement import RULES
from aorta.queues.probe.parts.priority import Effect, Inversion
from aorta.queues.probe.parts.queues import QueueCount
from aorta.queues.probe.parts.sharing import Sharing
from aorta.queues.probe.parts.switch import SwitchCost

SCHEMA = 3


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One device, one process. A part that is null has its reason in not_measured."""

    schema: int
    device: str
    environment: dict[str, str | None]
    """Variables that set the number of queues, as this process saw them; null where unset."""
    num_streams: int
    clock: ProbeClock
    queues: QueueCount | None
    sharing: Sharing | None
    blocking: Blocking | None
    switch: SwitchCost | None
    chains: Chains | None
    edges: list[QueueEdge] | None
    effect: Effect | None
    inversion: Inversion | None
    convoy: Convoy | None
    not_measured: dict[str, str]
    seconds: float


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """The number of queues that the streams use, and why it is believed."""

    queues: int | None
    """None where the methods disagree."""
    at_least: bool
    """Every stream tried has a queue to itself."""
    because: str


def conclude(queues: QueueCount | None, sharing: Sharing | None) -> Conclusion:
    """Staircase and sharing are independent; only a number that both give is one.

    Where nothing explains who waits behind whom there is no second number; then the staircase's starts and
    times must agree.
    """
    if queues is None or sharing is None:
        return Conclusion(queues=None, at_least=False, because="the staircase or the rows were not measured")
    staircase = f"{queues.queues} of up to {queues.steps[-1].streams} streams start at once"
    times = f"run times fit {queues.from_times} evenly filled queues"
    agreed = sharing.queues == queues.queues
    if sharing.queues is None:
        agreed = queues.agrees and queues.even and queues.primed
    return Conclusion(
        queues=queues.queues if agreed else None,
        at_least=agreed and queues.at_least,
        because="; ".join([staircase, *_groups(sharing), times, *_doubts(queues, sharing)]),
    )


def _groups(sharing: Sharing) -> list[str]:
    num, dealing = len(sharing.behind), sharing.dealing
    groups = f"{len(sharing.classes)} groups of {num} streams"
    if dealing is None:
        return [f"who waits behind whom makes {groups}"]
    share = f"{dealing.explained[dealing.best]} of {dealing.runs} runs"
    if dealing.rule is None:
        return [
            "no stream has a fixed queue; assignment is dynamic and not explained: the best rule of "
            f"{len(RULES)}, {RULES[dealing.best]}, predicts {share}"
        ]
    return [
        f"no stream has a fixed queue: {RULES[dealing.rule]}; with Q = {dealing.queues} that predicts {share}"
    ]


def _doubts(queues: QueueCount, sharing: Sharing) -> list[str]:
    doubts = []
    if not queues.even:
        doubts.append(f"but the queues are filled unevenly (times off by {queues.worst_error:.0%})")
    if sharing.dealing is None and sharing.contradictions:
        doubts.append(f"but {sharing.contradictions} pairs of streams contradict the groups")
    if not sharing.pairs_agree:
        doubts.append("but single pairs contradict the groups")
    if not (queues.primed and sharing.primed):
        doubts.append("but some runs were launch-bound")
    return doubts
