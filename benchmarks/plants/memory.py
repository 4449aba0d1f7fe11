"""Fifteen programs that run out of memory: does what is said name the kind, module, phase, line and rank?

    python benchmarks/plants/memory.py OUT                  on 2 GPUs, 3 minutes; on 1 without two cases
    python benchmarks/plants/memory.py OUT --device cpu     without two that need GPUs
    python benchmarks/plants/memory.py OUT --only logits    by name, with commas between
    python benchmarks/plants/memory.py OUT --again          judge what OUT holds; runs nothing

Each program is written as users write them, runs under `aorta run` with a small limit on its memory, and
dies. A case is right where all that its row lists is said. OUT keeps records and what programs printed.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "scripts" / "memory"
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import arguments, machine, write  # noqa: E402

OF_GPUS = ("pieces", "resolutions")
"""Only GPUs' allocator leaves pieces; a CPU's convolutions say "could not create a primitive"."""
MIB, CPU_MIB = 1024, 400
"""Limits. A host's is of the address space, of which libraries and threads take some."""


class Truth(NamedTuple):
    kind: str
    """Of what holds most, or that it is in pieces."""
    module: str = ""
    """Pattern of the modules that have most of it; '' where it is of no module."""
    phases: tuple[str, ...] = ("forward", "backward")
    rank: int = 0
    num_ranks: int = 1
    cpu_mib: int = 0
    says: str = ""
    """Pattern that the text has besides."""
    has_line: bool = False
    """A line of the program is marked: the holder is there."""


CASES = {
    "growing_lengths": Truth("activations", r"blocks|head", says=r"grew:"),
    "kept_losses": Truth("kept graphs", r"blocks|head", has_line=True),
    "one_rank_more": Truth(
        "activations", r"blocks|head", rank=1, num_ranks=2, cpu_mib=900, says=r"differs: rank 1"
    ),
    "pieces": Truth("pieces", phases=("rest", "forward"), says=r"expandable_segments"),
    "kept_outputs": Truth("kept tensors", has_line=True),
    "optimizer_state": Truth("optimizer state", r"blocks", phases=("optimizer",), cpu_mib=1200),
    "hidden_state": Truth("kept graphs", r"GRUCell|cell", has_line=True),
    "features": Truth("kept tensors", has_line=True),
    "logits": Truth("activations", r"head"),
    "long_attention": Truth("activations", r"attention"),
    "validation": Truth("kept graphs", r"blocks|head", phases=("evaluation",), says="no_grad", has_line=True),
    "averaged_weights": Truth(
        "kept tensors", phases=("rest", "forward", "backward", "optimizer"), num_ranks=2, has_line=True,
        cpu_mib=900, says=r"(differs: rank 0|also on)(.|\n)*change: let go of what snapshots",
    ),
    # Written after the rules were mended for the twelve above.
    "distillation": Truth("activations", r"head", says=r"grew:"),
    "resolutions": Truth("activations", r"stem|body", says=r"change: find out why batches"),
    "longest_first": Truth(
        "activations", r"blocks|head", rank=1, num_ranks=2, cpu_mib=900, says=r"differs: rank 1"
    ),
}  # fmt: skip


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="", metavar="NAME,…")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in CASES if not options.only or name in options.only.split(",")]
    num_devices = 1
    if options.again:
        names = [name for name in names if (options.out / name).is_dir()]
    elif options.device == "cuda":
        import torch

        num_devices = torch.cuda.device_count()
        names = [name for name in names if CASES[name].num_ranks <= num_devices]
    else:
        names = [name for name in names if name not in OF_GPUS]
    if not options.again:
        _run_all(names, options.out, options.device, num_devices)
    rows = [_judged(name, options.out) for name in names]
    for row in rows:
        wrong = ", ".join(key for key, value in row["right"].items() if not value)
        print(f"{row['name']:17} {'right' if not wrong else 'WRONG: ' + wrong}")
        print("".join(f"    {line}\n" for line in row["said"]), end="")
    num = sum(all(row["right"].values()) for row in rows)
    print(f"{num} of {len(rows)} right; {machine()}")
    write(options.output, [{"name": row["name"], **row["right"]} for row in rows])
    return 0


def _run_all(names: list[str], out: Path, device: str, num_devices: int) -> None:
    """Those of one rank beside each other, one a device; then those of two."""
    free: SimpleQueue[int] = SimpleQueue()
    for index in range(num_devices):
        free.put(index)

    def run_one(name: str) -> None:
        index = free.get()
        try:
            _run(name, out, device, str(index))
        finally:
            free.put(index)

    with ThreadPoolExecutor(num_devices) as pool:
        list(pool.map(run_one, [name for name in names if CASES[name].num_ranks == 1]))
    for name in names:
        if CASES[name].num_ranks > 1:
            _run(name, out, device, ",".join(map(str, range(num_devices))))


def _run(name: str, out: Path, device: str, visible: str) -> None:
    truth = CASES[name]
    mib = MIB if device == "cuda" else max(CPU_MIB, truth.cpu_mib)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PLANT_MIB": str(mib),
        "PLANT_DEVICE": device,
    }
    if device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = visible
    program = [sys.executable, str(HERE / f"{name}.py")]
    if truth.num_ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={truth.num_ranks}"]
        program = [sys.executable, *launcher, str(HERE / f"{name}.py")]
    command = [sys.executable, "-m", "aorta", "run", "--no-report", "-o", str(out / name), "--", *program]
    with open(out / f"{name}.txt", "w") as printed:
        subprocess.run(command, env=environment, stdout=printed, stderr=printed, timeout=170, check=False)


def _judged(name: str, out: Path) -> dict[str, Any]:
    from aorta.account.load.open import load_run
    from aorta.account.load.shortage import cause_of, grouped, largest
    from aorta.errors import ReportError
    from aorta.records.memory import read_shortages

    truth = CASES[name]
    said: list[str] = []
    try:
        try:
            story = load_run(out / name, name).story
        except ReportError as error:
            story = str(error).split("; ")
        said = [line for line in story if re.match(r"out of memory|near|held|grew|differs|change", line)]
        shortage = read_shortages(out / name, [truth.rank])[truth.rank]
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
        return {"name": name, "right": {"said": False}, "said": said}
    text = "\n".join(said)
    most = largest(shortage, grouped(shortage.held))
    assert most is not None
    kind = cause_of(shortage, grouped(shortage.held), not re.search(r"^(grew|differs):", text, re.MULTILINE))
    right = {
        "kind": re.fullmatch(truth.kind, kind) is not None,
        "module": not truth.module or re.search(truth.module, " ".join(most.modules[:2])) is not None,
        "phase": shortage.phase in truth.phases,
        "rank": f"out of memory on rank {truth.rank}" in text,
        "says": shortage.device == "cpu" or re.search(truth.says, text) is not None,
    }
    if truth.has_line:
        lines = (HERE / f"{name}.py").read_text().splitlines()
        line = next(number for number, code in enumerate(lines, start=1) if "# LINE" in code)
        found = [int(number) for number in re.findall(rf"\({name}\.py:(\d+)\)", text)]
        right["line"] = any(abs(number - line) <= 3 for number in found[:1])
    (out / f"{name}.json").write_text(json.dumps({"right": right, "said": said}, indent=1))
    return {"name": name, "right": right, "said": said}


if __name__ == "__main__":
    sys.exit(main())
