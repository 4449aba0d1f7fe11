"""Attaches the instrument to training code that does not know of it: `aorta run -- COMMAND`.

    settings.py        `aorta run` puts its options into AORTA_RUN and bootstrap/ first on PYTHONPATH
    bootstrap/sitecustomize.py   every Python below it runs this: waits for `import torch`, imports nothing
    hooks.py           sees optimizers, backward passes, evaluation and the end; cheap, loads no recorder
    session.py         the recorder and what runs beside it, loaded at the first sign of training
    step_detection.py  which calls make one iteration: plain logic without torch
    coverage.py        the lines that `aorta run` prints after the command
    instrument.py      `aorta.instrument`, for code that does know of aorta: its options and companions

Every hook catches what it raises: if aorta fails, it prints one line and detaches, and the job keeps running.
"""
