"""The files of a run: what is in them, and how they are written and read.

schema.py        every field of a step's line and of run.json: begin here
files.py         names of all files in a run's folder
writer.py        writes lines and run.json; moves an earlier run aside
seal.py          number and checksum at the end of each line
rotation.py      keeps a file of lines below 1 GiB
reader.py        reads step records and run.json
lines.py         decodes lines and checks their order and values, for reader.py and columns
columns.py       the numbers of the lines as arrays, beside them
state.py         where each rank stands, how it ended, and who ended the run
run_identity.py  which processes belong to the same run
requests.py      files by which `aorta capture` asks a running job
secrets.py       removes passwords and tokens from everything that is written
perfetto.py      a run in Chrome's trace format
"""
