"""Seconds of a collective: latency of its steps plus bytes over the slowest tier.

size_bytes is the full buffer of one rank, as in nccl-tests: what all_reduce is called on, what all_gather
returns, what reduce_scatter and all_to_all take. w bytes go over the wire in

    w / rate * (1 + sqrt(half_bytes / w))

seconds: the rate is approached slowly, as measured, and half of it is reached at half_bytes.

Algorithms: ring for all_reduce, all_gather, reduce_scatter and broadcast; for all_reduce and broadcast also
the tree that saves latency. Inside a domain each also runs in the library's low-latency protocol, where flags
travel with the data: steps are shorter and bytes take longer. hierarchical sends one chunk per rank of the
domain over the network between two phases inside.
all_to_all: direct sends to every peer at once over link and network; hierarchical first gathers inside the
domain what goes to the same rank elsewhere, then sends it; pxn does the same in a pipeline, scale-up and
scale-out side by side, which is what DeepEP does; single_shot is one kernel that stores to all peers.

Sources: NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth); NCCL 2.12 release notes (PXN); NCCL
src/graph/tuning.cc (algorithms of each collective, protocols LL128 and Simple).
"""

import math
from typing import Literal, NamedTuple

import msgspec

from aorta.config.yaml_files import near
from aorta.errors import ProjectionError
from aorta.hardware.part import Hardware
from aorta.projection.estimates import KernelEstimate, estimate
from aorta.timeline.collective import busbw_factor

Algorithm = Literal[
    "auto",
    "ring",
    "tree",
    "low_latency_ring",
    "low_latency_tree",
    "direct",
    "single_shot",
    "hierarchical",
    "pxn",
]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
RING = ("ring", "low_latency_ring", "hierarchical")
TREE = ("ring", "tree", "low_latency_tree", "low_latency_ring", "hierarchical")
ALGORITHMS = {
    "all_reduce": TREE,
    "all_gather": RING,
    "reduce_scatter": RING,
    "broadcast": TREE[:4],
    "all_to_all": ("direct", "single_shot", "hierarchical", "pxn"),
    "p2p": ("direct",),
}
OWN_CHUNKS = {"all_reduce": 0.5, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 0.0}
"""A rank's own chunk is copied by all_gather and reduce_scatter; all_reduce in place reads it once."""


class RankGroup(msgspec.Struct, frozen=True):
    """num_ranks ranks, ranks_per_domain of them in each scale-up domain (node, or NVL72 rack)."""

    num_ranks: int
    ranks_per_domain: int

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_per_domain <= self.num_ranks:
            raise ProjectionError(
                f"a group of {self.num_ranks} ranks cannot have {self.ranks_per_domain} in one domain"
            )
        if self.num_domains * self.ranks_per_domain != self.num_ranks:
            raise ProjectionError(
                f"{self.num_ranks} ranks do not fill domains of {self.ranks_per_domain} evenly"
            )

    @property
    def num_domains(self) -> int:
        """Domains that the group spans."""
        return self.num_ranks // self.ranks_per_domain


def rank_group(
    num_ranks: int, hardware: Hardware, stride: int = 1, gpus_per_node: int | None = None
) -> RankGroup:
    """The group of ranks 0, stride, 2 stride, ... when ranks fill the domains in order.

    A data-parallel group beside tp = 8 has stride 8: on nodes of 8 every member is on another node.
    """
    if num_ranks < 1 or stride < 1:
        raise ProjectionError(f"a group needs ranks and a stride of at least 1, got {num_ranks} and {stride}")
    inside = min(num_ranks, max(1, domain_size(hardware, gpus_per_node) // stride))
    while num_ranks % inside:  # a domain that the group does not fill evenly: the even part decides
        inside -= 1
    return RankGroup(num_ranks, inside)


def domain_size(hardware: Hardware, gpus_per_node: int | None = None) -> int:
    """GPUs of one scale-up domain on nodes of gpus_per_node; None: the node of the hardware file.

    A node bounds the domain, but where links reach beyond the file's node, as in an NVL72. More GPUs in a
    node than the links join are several domains.
    """
    up, out = hardware.scale_up, hardware.scale_out
    if gpus_per_node is None or up.domain_size > out.gpus_per_node:
        return up.domain_size
    return min(up.domain_size, gpus_per_node)


def collective_time(
    op: str, size_bytes: float, group: RankGroup, hardware: Hardware, algorithm: Algorithm = "auto"
) -> KernelEstimate:
    """Seconds of one collective on the GPUs, all ranks arriving together. One rank costs nothing.

    auto is what the vendor's library would run: the fastest of ring and tree, direct for all_to_all.
    """
    if op not in OPS:
        raise ProjectionError(f"{op!r} is not a collective{near(op, OPS)}")
    if size_bytes < 0:
        raise ProjectionError(f"{op} needs bytes of at least 0, got {size_bytes:g}")
    if algorithm != "auto" and algorithm not in ALGORITHMS[op]:
        raise ProjectionError(f"{op} has no algorithm {algorithm!r}{near(algorithm, ALGORITHMS[op])}")
    if group.ranks_per_domain > hardware.scale_up.domain_size:
        raise ProjectionError(
            f"{hardware.name} links {hardware.scale_up.domain_size} GPUs, "
            f"a group has {group.ranks_per_domain} of them in one domain"
        )
    interval = hardware.efficiency.collective.interval
    if op != "p2p" and group.num_ranks == 1:
        return estimate(0.0, "latency", f"{op} of one rank", interval)
    tried = {name: _cost(op, size_bytes, group, hardware, name) for name in _candidates(op, algorithm, group)}
    name, cost = min(tried.items(), key=lambda item: item[1].total_s)
    busbw = busbw_factor(op, group.num_ranks) * size_bytes / cost.total_s
    limit = busbw_limit(op, group, hardware, name)
    assert busbw <= limit * (1 + 1e-9), f"{op} {name}: {busbw:g} bytes/s exceed the links' {limit:g}"
    wire_s = max(cost.link_s, cost.nic_s)
    bound = "latency" if cost.latency_s > wire_s else "nic" if cost.nic_s > cost.link_s else "link"
    return estimate(
        cost.total_s,
        bound,
        f"{op} {name}",
        interval,
        {
            "latency_s": cost.latency_s,
            "link_s": cost.link_s,
            "nic_s": cost.nic_s,
            "busbw_bytes_per_s": busbw,
            "busbw_limit_bytes_per_s": limit,
        },
    )


def _candidates(op: str, algorithm: Algorithm, group: RankGroup) -> tuple[str, ...]:
    if algorithm != "auto":
        return (algorithm,)
    if op in ("all_to_all", "p2p"):
        return ("direct",)
    inside = group.num_domains == 1
    return tuple(
        name
        for name in ALGORITHMS[op]
        if name != "hierarchical" and (inside or not name.startswith("low_latency"))
    )


class Cost(NamedTuple):
    """Parts of one algorithm's time."""

    latency_s: float
    link_s: float
    nic_s: float
    total_s: float


def _cost(op: str, size_bytes: float, group: RankGroup, hardware: Hardware, algorithm: str) -> Cost:
    if op == "p2p":
        return _p2p(size_bytes, group, hardware)
    if op == "all_to_all":
        return _all_to_all(size_bytes, group, hardware, algorithm)
    if algorithm == "hierarchical" and group.num_domains > 1 and group.ranks_per_domain > 1:
        return _hierarchical(op, size_bytes, group, hardware)
    return _ring(
        op, size_bytes, group, hardware, algorithm.endswith("tree"), algorithm.startswith("low_latency")
    )


def _ring(
    op: str, size_bytes: float, group: RankGroup, hardware: Hardware, tree: bool, low_latency: bool = False
) -> Cost:
    """A ring through all ranks that enters and leaves each domain over all of the domain's NICs in parallel.

    A tree keeps the bytes and shortens the way to a logarithm. low_latency: flags with the data.
    """
    fitted = hardware.efficiency.collective
    n, inside, domains = group.num_ranks, group.ranks_per_domain, group.num_domains
    phases = 2 if op == "all_reduce" else 1
    if tree:
        link_steps, nic_steps = math.ceil(math.log2(inside)), math.ceil(math.log2(domains))
    else:
        link_steps, nic_steps = n - domains, domains - 1
    hop_s = fitted.low_latency_hop_s if low_latency else fitted.hop_s
    latency_s = fitted.start_s + phases * (link_steps * hop_s + nic_steps * fitted.nic_hop_s)
    on_wire = busbw_factor(op, n) * size_bytes
    work = on_wire + fitted.own_chunk * OWN_CHUNKS[op] * size_bytes / n
    link, nic = _rates(group, hardware)
    link = _through(link, hardware.scale_up.sustained_gpu_bytes_per_s, group)
    link *= fitted.low_latency_rate if low_latency else 1.0
    link_s = _transfer_s(work, link, fitted.half_bytes) if inside > 1 else 0.0
    nic_s = _transfer_s(on_wire, nic * inside, fitted.half_bytes) if domains > 1 else 0.0
    return Cost(latency_s, link_s, nic_s, latency_s + max(link_s, nic_s))


def _hierarchical(op: str, size_bytes: float, group: RankGroup, hardware: Hardware) -> Cost:
    """Adds the phases: inside the domain, one chunk per rank across, inside again."""
    inner = RankGroup(group.ranks_per_domain, group.ranks_per_domain)
    outer = RankGroup(group.num_domains, 1)
    chunk = size_bytes / group.ranks_per_domain
    if op == "all_reduce":
        parts = [
            _ring("reduce_scatter", size_bytes, inner, hardware, False),
            _ring("all_reduce", chunk, outer, hardware, True),
            _ring("all_gather", size_bytes, inner, hardware, False),
        ]
    else:
        parts = [_ring(op, size_bytes, inner, hardware, False), _ring(op, chunk, outer, hardware, False)]
    return Cost(*(sum(seconds) for seconds in zip(*parts, strict=True)))


def _all_to_all(size_bytes: float, group: RankGroup, hardware: Hardware, algorithm: str) -> Cost:
    fitted = hardware.efficiency.collective
    n, inside, domains = group.num_ranks, group.ranks_per_domain, group.num_domains
    link, nic = _rates(group, hardware)
    link_rate, nic_rate = link * fitted.all_to_all_link, nic
    to_inside, to_outside = size_bytes * (inside - 1) / n, size_bytes * (n - inside) / n
    peers_inside, peers_outside = inside - 1, n - inside
    if algorithm == "direct":
        nic_rate *= fitted.all_to_all_nic
    if algorithm in ("hierarchical", "pxn"):
        # A message goes to the rank of this domain on the receiver's rail first.
        to_inside, peers_outside = size_bytes * (inside - 1) / inside, domains - 1
    latency_s = fitted.start_s + (fitted.hop_s if inside > 1 else 0.0)
    latency_s += fitted.nic_hop_s if domains > 1 else 0.0
    if algorithm != "single_shot":
        latency_s += max(0, peers_inside - 1) * fitted.peer_s
        latency_s += max(0, peers_outside - 1) * fitted.nic_peer_s
    link_s = _transfer_s(to_inside, link_rate, fitted.half_bytes)
    nic_s = _transfer_s(to_outside, nic_rate, fitted.half_bytes)
    wire_s = link_s + nic_s if algorithm == "hierarchical" else max(link_s, nic_s)
    return Cost(latency_s, link_s, nic_s, latency_s + wire_s)


def _p2p(size_bytes: float, group: RankGroup, hardware: Hardware) -> Cost:
    fitted = hardware.efficiency.collective
    _, nic = _rates(group, hardware)
    if _inside(group):
        rate = _pair_rate(hardware, hardware.scale_up.sustained_gpu_bytes_per_s)
        latency_s = fitted.start_s + fitted.hop_s
        link_s = _transfer_s(size_bytes, rate, fitted.half_bytes)
        return Cost(latency_s, link_s, 0.0, latency_s + link_s)
    latency_s = fitted.start_s + fitted.nic_hop_s
    nic_s = _transfer_s(size_bytes, nic, fitted.half_bytes)
    return Cost(latency_s, 0.0, nic_s, latency_s + nic_s)


def _transfer_s(wire_bytes: float, bytes_per_s: float, half_bytes: float) -> float:
    return (wire_bytes + math.sqrt(half_bytes * wire_bytes)) / bytes_per_s


def busbw_limit(op: str, group: RankGroup, hardware: Hardware, algorithm: str = "auto") -> float:
    """The bus bandwidth that the data sheet's links allow.

    Bus bandwidth counts the bytes of a ring. hierarchical and all_to_all send less than that over a tier,
    so the tier allows more of it.
    """
    link, nic = _peak_rates(group, hardware)
    n, inside, domains = group.num_ranks, group.ranks_per_domain, group.num_domains
    if op == "p2p":
        return _pair_rate(hardware, hardware.scale_up.gpu_bytes_per_s) if _inside(group) else nic
    if domains == 1:
        return link
    if op == "all_to_all":
        return nic * (n - 1) / (n - inside)
    if inside == 1:
        return nic
    if algorithm == "hierarchical":
        share = (n - 1) / n
        return min(link * share * inside / (inside - 1), nic * inside * share * domains / (domains - 1))
    return min(_through(link, hardware.scale_up.gpu_bytes_per_s, group), nic * inside)


def _inside(group: RankGroup) -> bool:
    """A pair of ranks of a group that lies in one domain."""
    return group.num_domains == 1


def _rates(group: RankGroup, hardware: Hardware) -> tuple[float, float]:
    """Sustained bytes/s of one rank over the links of its domain, and over its share of the NICs."""
    up, out = hardware.scale_up, hardware.scale_out
    share = out.nics_per_node / out.gpus_per_node
    return _link(group, hardware, up.sustained_gpu_bytes_per_s), out.sustained_nic_bytes_per_s * share


def _peak_rates(group: RankGroup, hardware: Hardware) -> tuple[float, float]:
    up, out = hardware.scale_up, hardware.scale_out
    share = out.nics_per_node / out.gpus_per_node
    return _link(group, hardware, up.gpu_bytes_per_s), out.nic_bytes_per_s * share


def _link(group: RankGroup, hardware: Hardware, gpu_bytes_per_s: float) -> float:
    """A mesh has one link per pair: a small group uses only the links between its members."""
    if hardware.scale_up.topology == "switch" or group.ranks_per_domain == 1:
        return gpu_bytes_per_s
    return gpu_bytes_per_s * (group.ranks_per_domain - 1) / (hardware.scale_up.domain_size - 1)


def _through(link_bytes_per_s: float, gpu_bytes_per_s: float, group: RankGroup) -> float:
    """Links of rings that come into a domain and leave it over the network.

    Of a mesh n members have room for n - 1 rings that stay inside and for n that only pass: two have one
    link, and it takes one ring in each direction. Never more than all links of a GPU.
    """
    if group.num_domains == 1 or group.ranks_per_domain == 1:
        return link_bytes_per_s
    passing = link_bytes_per_s * group.ranks_per_domain / (group.ranks_per_domain - 1)
    return min(gpu_bytes_per_s, passing)


def _pair_rate(hardware: Hardware, gpu_bytes_per_s: float) -> float:
    if hardware.scale_up.topology == "switch":
        return gpu_bytes_per_s
    return gpu_bytes_per_s / (hardware.scale_up.domain_size - 1)
