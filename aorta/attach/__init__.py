"""Attaches the instrument to training code that does not know of it: `aorta run -- COMMAND`.

    aorta run           sets AORTA_RUN and puts bootstrap/ first on the command's PYTHONPATH
    bootstrap/sitecustomize.py   in every Python below it: waits for `import torch`, imports nothing
    hooks               what tells of optimizers, backward passes, evaluation, the end; cheap, no recorder
    steps               which calls make one iteration: plain logic without torch
    session             the recorder and everything beside it, from the first sign of training on

Nothing here may take the job down: every hook catches what it raises, says one line and takes itself off.
"""
