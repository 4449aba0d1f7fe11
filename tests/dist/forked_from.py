"""What forked ranks and commands begin with: imported by the server that forks them, and by nothing else."""

import gc

import pytest  # noqa: F401
import scipy.stats  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import aorta.attach.session
import aorta.cli.report
import aorta.cli.run
import aorta.cli.why
import aorta.page.html
import aorta.page.write
import aorta.training.command
import aorta.why.causes.rank  # noqa: F401

gc.collect()
gc.freeze()  # else a collection in each forked process goes through all of it, and copies its pages
