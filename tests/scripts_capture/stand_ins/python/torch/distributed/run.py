"""In place of torchrun: notes how it was called and starts the ranks of this machine one after another."""

import argparse
import json
import os
import subprocess
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--nproc_per_node", type=int)
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--node_rank", type=int, default=0)
parser.add_argument("--master_addr")
parser.add_argument("--master_port")
parser.add_argument("--standalone", action="store_true")
parser.add_argument("--no_python", action="store_true")
parser.add_argument("command", nargs=argparse.REMAINDER)
options = parser.parse_args()
with open(os.environ["STAND_IN_LOG"], "a") as file:
    file.write(json.dumps({"torchrun": vars(options)}) + "\n")
status = 0
for local_rank in range(options.nproc_per_node):
    rank = options.node_rank * options.nproc_per_node + local_rank
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.nproc_per_node * options.nnodes),
    }
    front = [] if options.no_python else [sys.executable]
    status = max(status, subprocess.run([*front, *options.command], env=environment).returncode)
sys.exit(status)
