"""GPUs, nodes and networks: rates and sizes of each part, every number with its source.

part   the form of a part, reading it (load_hardware), and rates by data type and clock
names  from a device's own name, or a person's, to the file of its part
parts/ a file for each part; parts/vendor/ for what parts of a vendor share
"""
