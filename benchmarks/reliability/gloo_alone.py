"""torch's gloo without aorta, many works in flight in one process: does it end?

    python benchmarks/reliability/gloo_alone.py --trials 8 --output gloo_alone.json

A worker thread of ProcessGroupGloo notes the name of the operation that it has finished in a string of its
group, after it has let go of the group's lock; a group has two such threads. A name of at most 15 letters
lies within the string, a longer one (ALLGATHER_COALESCED, the operation of functional all-gathers) on the
heap, which two threads may then free twice. The cases tell the parts of this apart:

  one thread       the group has one worker
  two threads      as every group has
  short names      two workers; c10d::opTypeToString is replaced by one that cuts names at 15 letters
  same names       two workers; replaced by one that does not: the replacement alone changes nothing
  all-reduce       two workers, and an operation whose name is short

The replaced ones need g++. Exit status 1 where a case with one thread, short names or all-reduce failed: then
the fault is not only this one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

JOB = """
import sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
gloo, store = dist.ProcessGroupGloo, dist.HashStore()
options = gloo._Options()
options._threads = int(sys.argv[1])
options._devices = [gloo.create_device(hostname="127.0.0.1")]
group = dist.ProcessGroup(store, 0, 1)
group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
group._register_backend(
    torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo(dist.PrefixStore("0", store), 0, 1, options)
)
tensor, gathered = torch.ones(64, 4), torch.empty(64, 4)
end, num = time.monotonic() + float(sys.argv[3]), 0
while time.monotonic() < end:
    works = []
    for _ in range(40):
        if sys.argv[2] == "all-gather":
            works.append(group.allgather_into_tensor_coalesced([gathered], [tensor]))
        else:
            works.append(group.allreduce(tensor.clone()))
    for work in works:
        work.wait()
    num += len(works)
print(num)
"""
REPLACEMENT = """
#include <cstdint>
#include <dlfcn.h>
#include <string>
namespace c10d {
enum class OpType : std::uint8_t {};
std::string opTypeToString(OpType op) {
  using Original = std::string (*)(OpType);
  static Original original = (Original)dlsym(
      dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD), "_ZN4c10d14opTypeToStringB5cxx11ENS_6OpTypeE");
  return original(op).substr(0, LETTERS);
}
}
"""
CASES: dict[str, tuple[int, str, int | None]] = {
    "one thread": (1, "all-gather", None),
    "two threads": (2, "all-gather", None),
    "short names": (2, "all-gather", 15),
    "same names": (2, "all-gather", 1000),
    "all-reduce": (2, "all-reduce", None),
}
"""Worker threads, operation, letters of a name that are left; None: not replaced."""
SOUND = ("one thread", "short names", "all-reduce")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=8, help="of each case")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each trial")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for case in [case for _ in range(options.trials) for case in CASES]:
            result = trial(case, options.seconds, Path(folder))
            if result is not None:
                results[case].append(result)
    for case, trials in results.items():
        ended = sum(result["status"] == 0 for result in trials)
        print(f"{case}: {ended} of {len(trials)} ended with status 0")
    if options.output is not None:
        options.output.write_text(
            json.dumps(about() | {"seconds": options.seconds, "trials": results}, indent=1)
        )
    return int(any(result["status"] for case in SOUND for result in results[case]))


def trial(case: str, seconds: float, folder: Path) -> dict[str, Any] | None:
    """None where there is no compiler for it."""
    threads, operation, letters = CASES[case]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if letters is not None:
        if shutil.which("g++") is None:
            return None
        library = folder / f"names_{letters}.so"
        if not library.exists():
            command = ["g++", "-O2", "-shared", "-fPIC", f"-DLETTERS={letters}", "-x", "c++", "-", "-ldl"]
            subprocess.run([*command, "-o", str(library)], input=REPLACEMENT, text=True, check=True)
        environment["LD_PRELOAD"] = str(library)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", JOB, str(threads), operation, str(seconds)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    result = {
        "status": done.returncode,
        "collectives": int(done.stdout) if done.returncode == 0 else None,
        "said": done.stderr.splitlines()[-1:],
    }
    print(json.dumps({"case": case} | result), flush=True)
    return result


def about() -> dict[str, Any]:
    import torch

    return {"torch": torch.__version__, "python": sys.version.split()[0], "cores": os.cpu_count()}


if __name__ == "__main__":
    sys.exit(main())
