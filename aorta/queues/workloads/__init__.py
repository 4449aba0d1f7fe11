"""One file per workload, by category; the registry imports every module below.

The modules beside the categories are what several workloads are made of: ordering (dataflow), streams by role
(roles), inputs (inputs), collectives (communication), layers (block, decoder) and the comparison with a
reference (checking).
"""
