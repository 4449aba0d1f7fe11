"""Order and memory of streams: which two accesses to the same bytes nothing keeps apart.

order.py        clocks: what of the other streams comes before a stream's next operation
segments.py     last accesses by byte range
check.py        the check: a log of operations in, in order of issue; findings out
findings.py     findings as plain data
exceptions.py   findings that are known to be harmless, with the reason of each

Nothing here needs torch or a GPU; `aorta.check` fills the log, `aorta.programs.lint` uses the clocks.
"""
