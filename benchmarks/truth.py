"""Do kernel records say what kernels do? Needs a GPU for every rank.

torchrun --nproc_per_node 2 benchmarks/truth.py kernels --output kernels.csv      # kernel records, 3 min
torchrun --nproc_per_node 2 benchmarks/truth.py collectives --output OUT   # by collective and size, 2 min
python benchmarks/truth.py beside FOLDER...                 # kernel records of any run beside its traces
python benchmarks/truth.py memory --steps 60000             # does a recorded process grow? one GPU
"""

from harness import choose, part_of

if __name__ == "__main__":
    parts = {
        "kernels": part_of("truth_kernels", "records"),
        "collectives": part_of("truth_collectives", "measure"),
        "beside": part_of("truth_kernels", "beside"),
        "memory": part_of("truth_kernels", "memory"),
    }
    raise SystemExit(choose(__doc__, parts))
