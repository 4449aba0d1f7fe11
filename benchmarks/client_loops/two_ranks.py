"""Starts a script as two ranks, as torchrun does, without the agent: two_ranks.py SCRIPT ARGUMENTS..."""

import os
import socket
import subprocess
import sys


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]
    return max(process.wait() for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
