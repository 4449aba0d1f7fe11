"""The table of `aorta top`: newest lines of every rank, a row per rank, the straggler named above."""

import time
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from aorta.account.judge.late import LateRank
from aorta.account.load.goodput import goodput_text
from aorta.account.model import DAMAGED, MOST_DAMAGED, Goodput
from aorta.account.newest import Newest, RankMeans
from aorta.account.numbers import counted
from aorta.records.schema import RunRecord

STALE_STEPS = 10
COLUMNS = (
    ("rank", ""), ("step", ""), ("step", "ms"), ("compute", "ms"), ("exposed", "ms"), ("idle", "ms"),
    ("waits", "ms"), ("loss", ""), ("memory", "GiB"), ("clock", "MHz"), ("power", "W"),
)  # fmt: skip
NUM_ALWAYS = 6
"""Columns that are there although no rank has a value."""
MISSING = "-"


def top_table(
    run: RunRecord | None,
    newest: Newest,
    now_ns: int | None = None,
    height: int = 40,
    damage: Sequence[str] = (),
    goodput: Sequence[Goodput] = (),
) -> Group:
    """Screen of the job: one line for the run, what is damaged, the straggler, what of the time of several
    attempts counted, a row per rank."""
    ranks, late = newest.ranks, newest.late
    table = Table(box=None, pad_edge=False, header_style="bold")
    listed = _most_telling(ranks, late, max(4, height - 6))
    rows = [_row(rank) for rank in listed]
    shown = [i for i in range(len(COLUMNS)) if i < NUM_ALWAYS or any(row[i] != MISSING for row in rows)]
    for i in shown:
        name, unit = COLUMNS[i]
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for rank, row in zip(listed, rows, strict=True):
        style = "bold red" if late is not None and rank.rank == late.rank else ""
        table.add_row(*(row[i] for i in shown), style=style)
    lines: list[Text | Table] = [_headline(run, newest, time.time_ns() if now_ns is None else now_ns)]
    if damage:
        lines.append(Text(f"{DAMAGED}: {'; '.join(damage[:MOST_DAMAGED])}", "red"))
    if late is not None:
        lines.append(Text(f"rank {late.rank} is late: it costs {late.wait_ms:.1f} ms a step", "red"))
    if goodput:
        lines.append(Text(goodput_text(goodput)))
    if listed:
        lines.append(table)
    if num_more := len(ranks) + newest.num_unlisted - len(listed):
        lines.append(Text(f"and {num_more} more ranks", "dim"))
    return Group(*lines)


def _headline(run: RunRecord | None, newest: Newest, now_ns: int) -> Text:
    ranks = newest.ranks
    num_seen = len(ranks) + newest.num_unlisted
    if not ranks:
        return Text("no step yet")
    last = max((rank.last for rank in ranks), key=lambda record: record.end_unix_ns)
    age_s = max(0.0, (now_ns - last.end_unix_ns) / 1e9)
    num_ranks = f"{num_seen} of " if num_seen < last.world_size else ""
    text = f"step {last.global_step}   {num_ranks}{counted(last.world_size, 'rank')}"
    newest_steps = counted(max(rank.num_steps for rank in ranks), "step")
    if any(rank.recorded_step_ms not in (None, rank.step_ms) for rank in ranks):
        # A row is of the recorded steps alone, or its parts would not add up to its step.
        step_ms = [rank.step_ms for rank in ranks if rank.step_ms is not None]
        text += f"   rows: last {counted(max(rank.num_recorded for rank in ranks), 'recorded step')}"
        text += f"   last {newest_steps}: {sum(step_ms) / len(step_ms):.2f} ms" if step_ms else ""
    else:
        text += f"   means of last {newest_steps}"
    if run is not None and run.finished_unix_ns is not None:
        return Text(f"{text}   finished", "bold")
    step_s = (last.step_ms or 0.0) / 1e3
    style = "bold red" if age_s > max(10.0, STALE_STEPS * step_s) else "bold"
    return Text(f"{text}   last record {age_s:.0f} s ago", style)


def _most_telling(ranks: list[RankMeans], late: LateRank | None, max_rows: int) -> list[RankMeans]:
    """The ranks that fit on the screen: the straggler first, then those with most exposed communication."""
    if len(ranks) <= max_rows:
        return ranks
    first = [rank for rank in ranks if late is not None and rank.rank == late.rank]
    remaining = sorted((rank for rank in ranks if rank not in first), key=lambda r: -(r.exposed_ms or 0.0))
    return sorted(first + remaining[: max_rows - len(first)], key=lambda rank: rank.rank)


def _row(rank: RankMeans) -> list[str]:
    last = rank.last
    step_ms = rank.step_ms if rank.recorded_step_ms is None else rank.recorded_step_ms
    return [
        str(rank.rank),
        str(last.global_step),
        _number_text(step_ms, 1),
        _number_text(rank.compute_ms, 1),
        _number_text(rank.exposed_ms, 1),
        _number_text(rank.idle_ms, 1),
        _number_text(rank.exposed_wait_ms, 1),
        _number_text(last.loss, 4),
        _number_text(None if last.used_bytes is None else last.used_bytes / 2**30, 1),
        _number_text(last.sm_clock_mhz, 0),
        _number_text(last.power_w, 0),
    ]


def _number_text(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"
