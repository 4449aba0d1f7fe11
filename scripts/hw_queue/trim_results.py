"""A short copy of what benchmarks/queues.py wrote: figures without single iterations, machine or paths.

    python scripts/hw_queue/trim_results.py queues_2xcuda.json --document queues_2xcuda_points.json \
        --date 2026-11-20 queues_2xh200.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

KEPT = ("modes", "overlap", "capacity", "switch", "not_run", "failures", "elapsed_s")
VERSIONS = ("python", "torch", "cuda", "nccl", "driver")
DIGITS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="queues_<GPUs>.json")
    parser.add_argument("--document", type=Path, help="queues_<GPUs>_points.json, which says where it ran")
    parser.add_argument("--date", required=True, help="of the run")
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    setting = json.loads(given.document.read_text())["setting"] if given.document else None
    short = trimmed(result, setting) | {"date": given.date}
    given.output.write_text(json.dumps(rounded(short), indent=1) + "\n")
    print(f"wrote {given.output} ({given.output.stat().st_size / 1024:.0f} KiB)")


def trimmed(result: dict[str, Any], setting: dict[str, Any] | None) -> dict[str, Any]:
    found = {name: result[name] for name in KEPT if name in result}
    found["command"] = [Path(word).name if word.startswith("/") else word for word in result["command"]]
    if setting is not None:
        found["devices"] = [device["name"] for device in setting["devices"]]
        found["versions"] = {name: setting["versions"].get(name) for name in VERSIONS}
        found["queues"] = setting["queues"]
    found["points"] = [trimmed_point(point) for point in result.get("points", [])]
    return found


def trimmed_point(point: dict[str, Any]) -> dict[str, Any]:
    """Values with their intervals; of ranks what tells them apart."""
    ranks = [
        {
            "rank": run["rank"],
            "launch_bound": run["launch_bound"],
            "device_ms": run["device_ms"] / max(len(run["iteration_ms"]), 1),
            "correct": run["check"]["ok"],
            "power_w": (run["telemetry"] or {}).get("power_w"),
            "sm_clock_mhz": (run["telemetry"] or {}).get("sm_clock_mhz"),
            "throttling": (run["telemetry"] or {}).get("throttling"),
        }
        for run in point["ranks"]
    ]
    configuration = {k: point["configuration"][k] for k in ("workload", "streams", "sync_mode", "options")}
    metrics = {
        name: [
            one["value"],
            one["unit"],
            *([one["interval"]["low"], one["interval"]["high"]] if one["interval"] else []),
        ]
        for name, one in point["metrics"].items()
        if one["value"] is not None
    }
    return {
        "configuration": configuration,
        "status": point["status"],
        "collectives": point["collectives"],
        "iterations": point["iterations"],
        "metrics": metrics,
        "ranks": ranks,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return value


if __name__ == "__main__":
    main()
