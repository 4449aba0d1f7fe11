"""A run of six steps that ends in one of several ways."""

from tests.dist.launch import run_python

SCRIPT = """
import os, signal, sys, aorta
ending, first = sys.argv[2], int(sys.argv[3])
recorder = aorta.instrument(sys.argv[1])
recorder.__enter__()
for number in range(first, 6):
    with recorder.step(global_step=number) as step:
        step.log(loss=float(number))
        if number == 5 and ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5 and ending == "raises":
            raise ValueError("planted")
if ending == "forks":
    if os.fork() == 0:
        recorder.close()
        os._exit(0)
    os.wait()
    assert recorder._run.finished_unix_ns is None
if ending == "closed":
    recorder.close()
"""


def run(folder, ending, first=0, **environment):
    return run_python("-c", SCRIPT, folder, ending, first, **environment)
