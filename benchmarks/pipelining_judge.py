"""The verdicts on what benchmarks/pipelining.py wrote: arithmetic on JSON, no GPU and no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pipelining_numbers import FACTORIZED, SINGLE_HOISTS, combined, configuration
from pipelining_results import runs_of
from pipelining_simulated import race_lines, tau_lines

HOIST_REGAINS = 0.8


def judged(folder: Path, simulated: bool = True) -> str:
    """The verdicts on a folder, or on the file into which it was packed, as text.

    simulated: also what the simulator says, which takes some seconds.
    """
    lines: list[str] = []
    runs = runs_of(folder)
    if not runs:
        return f"{folder} holds no queues_*.json"
    orders = {run["queues"]: s for run in runs for s in run["sections"] if s["name"] == "orders"}
    for queues, section in orders.items():
        lines += [f"{queues} queues, {section['op']} {section['m']},{section['k']},{section['n']}"]
        lines += serial_lines(section["ms"]) + hoist_lines(section["ms"])
    if simulated:
        lines += race_lines(orders) + tau_lines(orders)
    for run in runs:
        for section in run["sections"]:
            if section["name"] == "graphs":
                lines += graph_lines(section["rows"])
            if section["name"] == "strategies":
                lines += strategy_lines(section)
            if section["name"] == "threads":
                lines += thread_lines(section["rows"])
        for failure in run["failed"]:
            error = failure["error"].strip().splitlines()[-1]
            lines.append(
                f"{run['queues']} queues: {failure['section']} failed on rank {failure['rank']}: {error}"
            )
        lines += [f"{run['queues']} queues: skipped {what}" for what in run["skipped"]]
    return "\n".join(lines)


def serial_lines(ms: dict[str, list[float]]) -> list[str]:
    """Fork and join in the loop against what S tiles cost without overlap.

    One stream: the same tiles on one stream, without any edge between streams (serial + S x cost per tile).
    Chain: the same tiles with as many edges, each tile made to follow the one before. Sum: one stream, and
    the cost of as many edges around empty kernels.
    """
    lines = [
        "  fork and join in the loop - the same S tiles without overlap, us:"
        " on one stream; as a chain of edges; one stream + edges alone"
    ]
    held: dict[str, list[bool]] = {}
    names = sorted(
        (n for n in ms if n.startswith(f"{FACTORIZED}/") and configuration(n)[0] > 1), key=configuration
    )
    for name in names:
        tiles, streams = configuration(name)
        suffix = name.removeprefix(FACTORIZED)
        one = f"seq/S{tiles}"
        if one not in ms:
            continue
        compared = {"one stream": [(1, name), (-1, one)]}
        if f"chain{suffix}" in ms:
            compared["chain"] = [(1, name), (-1, f"chain{suffix}")]
        if f"edges{suffix}" in ms:
            edges = [(-1, f"edges{suffix}"), (1, f"no_edges/S{tiles}")]
            compared["sum"] = [(1, name), (-1, one), *edges]
        texts = []
        for kind, terms in compared.items():
            middle, (low, high) = combined(ms, terms)
            held.setdefault(kind, []).append(low <= 0 <= high)
            verdict = "equal" if low <= 0 <= high else "differs"
            texts.append(f"{kind} {1e3 * middle:+7.1f} [{1e3 * low:+.1f}, {1e3 * high:+.1f}] {verdict}")
        share = 100 * combined(ms, compared["one stream"])[0] / float(np.median(ms[one]))
        per_tile = (float(np.median(ms[one])) - float(np.median(ms["serial"]))) / tiles
        lines.append(
            f"    S {tiles:2d} n {streams}: {'; '.join(texts)}  ({share:+.1f} % of one stream,"
            f" where a tile costs {1e3 * per_tile:.1f})"
        )
    counts = [f"{kind} {sum(equal)} of {len(equal)}" for kind, equal in held.items()]
    lines.append("    equal: " + ", ".join(counts))
    return lines


def hoist_lines(ms: dict[str, list[float]]) -> list[str]:
    """Where the best order gains more than three times its interval: what one hoist regains of it."""
    lines = [
        "  gain of the best order over fork and join in the loop; share that the better single hoist regains"
    ]
    shares = []
    for name in sorted((n for n in ms if n.startswith(f"{FACTORIZED}/")), key=configuration):
        tiles, streams = configuration(name)
        if tiles == 1:
            continue
        suffix = name.removeprefix(FACTORIZED)
        gains = {
            order: combined(ms, [(1, name), (-1, order + suffix)])
            for order in (*SINGLE_HOISTS, "both_hoisted")
            if order + suffix in ms
        }
        if not gains:
            continue
        best = max(gains, key=lambda order: gains[order][0])
        gain, (low, high) = gains[best]
        single = max((o for o in SINGLE_HOISTS if o in gains), key=lambda o: gains[o][0], default=None)
        clear = gain > 3 * (high - low) / 2
        if clear and single is not None:
            shares.append(gains[single][0] / gain)
        regained = (
            "-" if single is None or not clear else f"{100 * gains[single][0] / gain:.0f} % by {single}"
        )
        lines.append(
            f"    S {tiles:2d} n {streams}: {1e3 * gain:+8.1f} us [{1e3 * low:+.1f}, {1e3 * high:+.1f}]"
            f" by {best}; {regained if clear else 'not above three intervals'}"
        )
    if shares:
        enough = sum(share >= HOIST_REGAINS for share in shares)
        lines.append(
            f"    the better single hoist regains {100 * min(shares):.0f} % or more of every gain above three"
            f" intervals: {enough} of {len(shares)} rows at or above {100 * HOIST_REGAINS:.0f} %"
        )
    else:
        lines.append("    no gain is above three intervals")
    return lines


def graph_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["captured graphs against the order that lint derives"]
    for row in rows:
        if "error" in row:
            lines.append(f"  {row['op']} {row['order']}: {row['error']}")
            continue
        equal = row["unexpected"] == row["absent"] == 0
        replay = f"; replay {np.median(row['replay_ms']):.3f} ms" if "replay_ms" in row else ""
        differs = f"{row['unexpected']} not predicted, {row['absent']} missing"
        lines.append(
            f"  {row['op']} {row['order']}: {'same reachability' if equal else differs}"
            f" ({row['nodes']} nodes, {row['edges']} edges; lint: {row['false_edges_of_lint']} false){replay}"
        )
    return lines


def thread_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["threads and gloo against the simulator, slices of 20 ms"]
    for row in rows:
        measured = float(np.median(row["ms"]))
        error = 100 * (row["predicted_ms"] / measured - 1)
        lines.append(
            f"  {row['op']} {row['order']:13s} {measured:7.1f} ms,"
            f" predicted {row['predicted_ms']:7.1f} ({error:+.1f} %)"
        )
    return lines


def strategy_lines(section: dict[str, Any]) -> list[str]:
    found = section["comparison"]
    lines = [f"{found['op']} {section['shape']} {found['m']},{found['k']},{found['n']}: {found['verdict']}"]
    gemm = found["gemm_ms"]["value"]
    copies = found.get("copy_engine_ms")
    lines.append(
        f"  multiply {gemm:.3f} ms, collective {found['comm_ms']['value']:.3f} ms"
        + ("" if copies is None else f", copy engine alone {copies['value']:.3f} ms")
    )
    lines.append(
        f"  {'':34s} {'ms':>8s}  x gemm     eta (95 %)           x own bound  own eta  of pipeline bound"
    )
    for row in found["rows"]:
        time, eta, own_eta = row["time_ms"]["value"], row["efficiency"], row.get("efficiency_of_own_bound")
        over, share = row.get("time_over_own_bound"), row.get("share_of_pipeline_bound")
        lines.append(
            f"  {row['family']:34s} {time:8.3f}  {time / gemm:6.2f}"
            + (
                "  -".ljust(23)
                if eta is None
                else f"  {eta['value']:6.2f} [{eta['low']:5.2f}, {eta['high']:5.2f}]"
            )
            + (f"{'-':>12s}" if over is None else f"{over:12.2f}")
            + (f"{'-':>9s}" if own_eta is None else f"{own_eta['value']:9.2f}")
            + (f"{'-':>9s}" if share is None else f"{100 * share:8.0f} %")
        )
    lines += [f"  not available: {name}: {reason}" for name, reason in found["unavailable"].items()]
    return lines
