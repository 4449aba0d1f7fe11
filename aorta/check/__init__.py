"""Watches a training process for hazards and wrong numbers: the log of `aorta.hazards`, filled.

watch.py         a companion of the recorder: which steps are checked; findings of each window
operators.py     what each operator of the dispatcher reads and writes
sites.py         where operations were issued
names.py         what the program calls its parameters, modules and streams
device_order.py  events, waits, synchronisations and the allocator, as torch tells of them
works.py         waits for asynchronous collectives on the CPU
launches.py      kernels of Triton and of inductor, which the dispatcher does not see
delays.py        delays an operation, to see whether another one overtakes it
graphs.py        captures and replays of CUDA graphs
fingerprints.py  what a tensor holds, as a few numbers
numbering.py     fingerprints of gradients, parameters and collectives of checked steps

Needs torch. `aorta check` puts it into any program, by `aorta.attach`.
"""
