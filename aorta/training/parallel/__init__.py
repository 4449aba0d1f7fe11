"""Data, tensor and expert parallelism over device meshes, with gradients and norms right across them."""

from aorta.training.parallel.clip import clip_grad_norm
from aorta.training.parallel.mesh import Meshes, make_meshes
from aorta.training.parallel.replicate import ParallelModel, WrappedParts, parallelize
from aorta.training.parallel.shards import fill, parameter_groups

__all__ = [
    "Meshes",
    "ParallelModel",
    "WrappedParts",
    "clip_grad_norm",
    "fill",
    "make_meshes",
    "parallelize",
    "parameter_groups",
]
