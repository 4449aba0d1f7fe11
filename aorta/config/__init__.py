"""Settings of a training run, and how they are read; no torch, no GPU.

structs     every setting with its type, default and meaning
load        a YAML file, its bases and overrides to a Config; wrong keys and values named in one line
layout      the mesh that a Config gives for a world size, and combinations that cannot work
yaml_files  reading YAML safely; structs of other YAML files of aorta (parts, plans, budgets)
files/      configurations that come with aorta
"""
