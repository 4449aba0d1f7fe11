"""Do kernel records and the library's own events say what kernels do? Needs a GPU for every rank.

    torchrun --nproc_per_node 2 benchmarks/truth.py kernels --output kernels.csv      # kernel records, 3 min
    python benchmarks/truth.py beside FOLDER...                 # kernel records of any run beside its traces
    python benchmarks/truth.py memory --steps 60000             # does a recorded process grow? one GPU
    torchrun --nproc_per_node 2 benchmarks/truth.py library --output library.csv      # NCCL's events, 3 min

Kernels, beside and memory are in truth_kernels.py, library is in truth_library.py.
"""

from harness import choose, part_of

if __name__ == "__main__":
    parts = {
        "kernels": part_of("truth_kernels", "records"),
        "beside": part_of("truth_kernels", "beside"),
        "memory": part_of("truth_kernels", "memory"),
        "library": part_of("truth_library", "main"),
    }
    raise SystemExit(choose(__doc__, parts))
