"""Data, tensor and expert parallelism over device meshes, with gradients and norms right across them."""

from aorta.parallel.clip import clip_grad_norm
from aorta.parallel.mesh import Meshes, make_meshes
from aorta.parallel.replicate import ParallelModel, Parts, parallelize
from aorta.parallel.shards import fill, parameter_groups

__all__ = [
    "Meshes",
    "ParallelModel",
    "Parts",
    "clip_grad_norm",
    "fill",
    "make_meshes",
    "parallelize",
    "parameter_groups",
]
