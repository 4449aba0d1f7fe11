"""Sees every collective of the process and every wait for one, by whatever path.

switch.py         puts everything on and takes it off; compares with what the backends counted
operators.py      the operators `c10d::*`, which every call of torch.distributed ends in
method_calls.py   a shorter way for the calls that Python makes most often
works.py          the Work that a call returns: who waits for it, or for its future
stalls.py         other waits of the compute stream: events, streams, the end of backward, captures
replaced.py       how methods are replaced and put back, and kept from torch.compile
"""
