"""Calculon's step times for the published rows that it can describe, beside those measured and projected.

python benchmarks/projection/calculon_rows.py --calculon CHECKOUT --data DIR --output calculon_rows.json

CHECKOUT is a clone of https://github.com/calculon-ai/calculon (Apache 2.0; pure Python, nothing to install).
It models GPTs of two matrices with all heads alike under Megatron on A100 and H100, in 16 bit.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {
    "gpt3-175b": "gpt3-175B",
    "gpt3-22b": "megatron-22B",
    "gpt3-530b": "turing-530B",
    "megatron-1t": "megatron-1T",
}
VALIDATE = Path(__file__).with_name("validate.py")
SYSTEMS = {"A100": "a100_80g", "H100": "h100_80g_nvl8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calculon", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    projected = projections(options.data)
    rows = []
    for table in sorted(options.data.rglob("measured_throughput*.csv")):
        with table.open(encoding="utf-8", newline="") as file:
            rows += [line for line in csv.DictReader(file) if describes(line)]
    commit = git_commit(options.calculon)
    result = {
        "tool": f"calculon-ai/calculon@{commit}",
        "command": "python benchmarks/projection/calculon_rows.py --calculon CHECKOUT --data DIR",
        "rows": [judged(line, options.calculon, projected) for line in rows],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


def describes(line: dict[str, str]) -> bool:
    """True if Calculon has the model, the part and the number format of a row."""
    known = line["model"] in MODELS and line["gpu"] in SYSTEMS
    return known and line["precision"] in ("fp16", "bf16") and line["complete"] == "yes"


def projections(data: Path) -> dict[str, float]:
    """Errors in % of throughput of aorta's own projection by row."""
    command = [sys.executable, str(VALIDATE), "--data", str(data), "--json"]
    files = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)["files"]
    tables = [report for name, report in files.items() if name.startswith("measured_throughput")]
    return {row["name"]: row["error_pct"] for report in tables for row in report["rows"]}


def judged(line: dict[str, str], calculon: Path, projected: dict[str, float]) -> dict[str, Any]:
    """Measured and Calculon's seconds of a step, and both errors in % of throughput."""
    gpus, seq = int(line["n_gpus"]), int(line["seq"])
    measured_s = int(line["gbs"]) * seq / float(line["tok_s_gpu"]) / gpus
    step_s, reason = step_of(line, calculon)
    return {
        "name": line["id"],
        "measured_s": measured_s,
        "calculon_s": step_s,
        "calculon_error_pct": None if step_s is None else (measured_s / step_s - 1) * 100,
        "aorta_error_pct": projected.get(line["id"]),
        "reason": reason,
    }


def step_of(line: dict[str, str], calculon: Path) -> tuple[float | None, str | None]:
    """Calculon's seconds of a step, or why there are none."""
    tp, pp = int(line["tp"]), int(line["pp"])
    parallel_sequence = "no sequence parallelism" not in line["quality"]
    overlaps = line["framework"] == "nemo"
    execution = {
        "num_procs": int(line["n_gpus"]),
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": int(line["n_gpus"]) // tp // pp,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 1,
        "batch_size": int(line["gbs"]),
        "microbatch_size": int(line["mbs"]),
        "datatype": "float16",
        "fused_activation": overlaps,
        "attention_type": "multihead",
        "activation_recompute": {"selective": "attn_only"}.get(
            line["recompute"], line["recompute"] or "none"
        ),
        "pipeline_interleaving": int(line["vpp"]),
        "optimizer_sharding": line["shard"] == "distopt",
        "tensor_par_comm_type": "rs_ag" if parallel_sequence else "ar",
        "tensor_par_overlap": "ring" if overlaps else "none",
        "seq_par_ag_redo": parallel_sequence,
        "data_par_overlap": overlaps,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
    model = calculon / "models" / f"{MODELS[line['model']]}.json"
    system = calculon / "systems" / f"{SYSTEMS[line['gpu']]}.json"
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "execution.json", Path(folder) / "stats.json"
        path.write_text(json.dumps(execution), encoding="utf-8")
        command = [sys.executable, "bin/calculon", "llm", str(model.resolve()), str(path)]
        done = subprocess.run(
            [*command, str(system.resolve()), str(output)],
            cwd=calculon, env={"PYTHONPATH": "."}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not output.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            return None, lines[-1] if lines else f"exit code {done.returncode}"
        return float(json.loads(output.read_text(encoding="utf-8"))["total_time"]), None


def git_commit(folder: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
