"""Traces of other tools: Kineto, rocprofv3, Nsight Systems. Each is read to one form, a RankTrace
per rank.

sources, sniff  which files of a folder are whose trace, and of which format
kineto, kineto_file, rocprof, rocpd, nsys
                the readers, one for each format: they fill in Activities
host_calls, classify
                what launched a kernel, and what it does by its name
assemble        Activities to RankTrace (model), with steps by the host's marks
steps           steps of a trace that has no marks
quality         faults and gaps of a trace in words
inventory       device work of each step, with the operators that launched it
files           opening gzip and SQLite from elsewhere
"""
