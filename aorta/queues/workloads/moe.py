"""A layer of experts: route, all-to-all, experts, all-to-all back, combine.

C chunks of tokens, T tokens of one, D model dim, F hidden dim, R ranks, E experts of one rank, K experts per
token, S slots of an expert for one rank's chunk.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads.communication import make_lanes
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow

NUM_EXPERTS = 16
NUM_ACTIVE = 2
NUM_CHUNKS = 4
CAPACITY_FACTOR = 1.25
TOKENS = {"full": 8192, "small": 64}
DIM = {"full": 2048, "small": 16}
HIDDEN = {"full": 4096, "small": 32}
ALL_TO_ALL, ROUTER = 0, 1
FIRST_EXPERT = 2
KERNELS_OF_ROUTE, KERNELS_OF_EXPERT, KERNELS_OF_COMBINE = 16, 5, 5


class Moe(CheckedWorkload):
    """outputs: y [C, T, D]; slots [C, T, K], the places that the router gave the tokens."""

    name = "moe"
    priority = "P1"
    unit = "tokens"
    question = "Do experts on streams of their own run side by side, and hide the all-to-all of other tokens?"
    stream_meaning = (
        f"Stream 0 exchanges tokens, 1 routes and combines; {NUM_EXPERTS} experts of this rank are dealt to "
        "the other N−2."
    )
    min_streams = FIRST_EXPERT + 1
    max_streams = FIRST_EXPERT + NUM_EXPERTS
    uses_collectives = True

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.dim, self.hidden, self.num_tokens = DIM[size], HIDDEN[size], TOKENS[size]
        (self.lane,) = make_lanes(context, 1)
        self.num_ranks = self.lane.size
        self.num_all = NUM_EXPERTS * self.num_ranks
        self.num_slots = int(self.num_tokens * NUM_ACTIVE / self.num_all * CAPACITY_FACTOR) + 1
        inputs = self.inputs = Inputs(context)
        self.x_CTD = inputs.normal("x", (NUM_CHUNKS, self.num_tokens, self.dim), rank=context.rank)
        self.gate_DE = inputs.weight("gate", self.dim, self.num_all).float()
        self.experts = [self._expert(context.rank * NUM_EXPERTS + e) for e in range(NUM_EXPERTS)]
        # One row more than slots: the place of tokens that found no room.
        rows = (NUM_CHUNKS, self.num_all * self.num_slots + 1, self.dim)
        self.sent, self.returned = inputs.zeros(rows), inputs.zeros(rows)
        exchanged = (NUM_CHUNKS, self.num_ranks, NUM_EXPERTS, self.num_slots, self.dim)
        self.received, self.done = inputs.zeros(exchanged), inputs.zeros(exchanged)
        self.weight_CTK = torch.zeros(NUM_CHUNKS, self.num_tokens, NUM_ACTIVE, device=context.device)
        self.outputs = {
            "y": inputs.zeros(self.x_CTD.shape),
            "slots": torch.zeros_like(self.weight_CTK, dtype=torch.int64),
        }
        self.numbers = torch.arange(self.num_tokens * NUM_ACTIVE, device=context.device)
        self.flow = Dataflow(context)

    def _expert(self, number: int) -> tuple[Tensor, Tensor]:
        """Weights of an expert, numbered over all ranks."""
        up = self.inputs.weight(f"up {number}", self.dim, self.hidden)
        return up, self.inputs.weight(f"down {number}", self.hidden, self.dim)

    def iteration(self, index: int) -> None:
        chunks = range(NUM_CHUNKS)
        for c in chunks:
            self.flow.put(ROUTER, "route", partial(self._route, c), writes=[("sent", c), ("routed", c)])
        # All dispatches before any return: a return waits for experts and would hold up the next dispatch.
        for c in chunks:
            work = partial(self.lane.all_to_all, self._by_rank(self.received, c), self._slots(self.sent, c))
            self.flow.put(ALL_TO_ALL, "comm dispatch", work, [("sent", c)], [("received", c)])
        for c in chunks:
            self._run_experts(c)
        for c in chunks:
            finished = [("done", c, e) for e in range(NUM_EXPERTS)]
            work = partial(self.lane.all_to_all, self._slots(self.returned, c), self._by_rank(self.done, c))
            self.flow.put(ALL_TO_ALL, "comm return", work, finished, [("returned", c)])
        for c in chunks:
            self.flow.put(ROUTER, "combine", partial(self._combine, c), [("returned", c), ("routed", c)])

    def _run_experts(self, c: int) -> None:
        num = self.context.num_streams - FIRST_EXPERT
        for e in range(NUM_EXPERTS):
            work = partial(self._run_expert, c, e)
            self.flow.put(FIRST_EXPERT + e % num, "expert", work, [("received", c)], [("done", c, e)])

    def _slots(self, rows: Tensor, c: int) -> Tensor:
        """Without the last row; the first axis in equal pieces for the ranks."""
        return rows[c, :-1]

    def _by_rank(self, exchanged: Tensor, c: int) -> Tensor:
        return exchanged[c].view(-1, self.dim)

    def _route(self, c: int) -> None:
        """Sends each token to its K best experts; an expert takes the first S, the others are dropped."""
        score_TE = (self.x_CTD[c].float() @ self.gate_DE).softmax(dim=-1)
        weight_TK, expert_TK = score_TE.topk(NUM_ACTIVE, dim=-1)
        by_expert, order = expert_TK.flatten().sort(stable=True)  # an expert's tokens stay in their order
        first_E = torch.searchsorted(by_expert, self.numbers[: self.num_all])
        place = torch.empty_like(order).index_copy_(0, order, self.numbers - first_E[by_expert])
        slot = expert_TK.flatten() * self.num_slots + place
        slot.masked_fill_(place >= self.num_slots, self.num_all * self.num_slots)
        self.weight_CTK[c].copy_(weight_TK)
        self.outputs["slots"][c].copy_(slot.view_as(expert_TK))
        self.sent[c].zero_()
        self.sent[c].index_copy_(0, slot, self.x_CTD[c].repeat_interleave(NUM_ACTIVE, dim=0))

    def _run_expert(self, c: int, e: int) -> None:
        up, down = self.experts[e]
        tokens = self.received[c, :, e].reshape(-1, self.dim)
        y = (tokens @ up).relu_() @ down
        self.done[c, :, e].copy_(y.view(self.num_ranks, self.num_slots, self.dim))

    def _combine(self, c: int) -> None:
        slot_TK = self.outputs["slots"][c]
        expert_outputs = self.returned[c].index_select(0, slot_TK.flatten()).view(*slot_TK.shape, self.dim)
        weighted = expert_outputs.float() * self.weight_CTK[c].unsqueeze(-1)
        self.outputs["y"][c].copy_(weighted.sum(dim=1))

    def amount(self) -> Amount:
        num_tokens = NUM_CHUNKS * self.num_tokens
        kernels = KERNELS_OF_ROUTE + 2 + NUM_EXPERTS * KERNELS_OF_EXPERT + KERNELS_OF_COMBINE
        return Amount(operations=NUM_CHUNKS * kernels, samples=num_tokens, units=num_tokens)

    def device_work(self) -> DeviceWork:
        """Work of the experts, with every slot filled."""
        rows = self.done[:, :, :, :, 0].numel()
        return matrix_work(self.done.dtype, 4.0 * rows * self.dim * self.hidden)

    def comparisons(self) -> Iterable[TensorComparison]:
        slots = torch.stack([self._expected_slots(c) for c in range(NUM_CHUNKS)])
        yield TensorComparison("slots", self.outputs["slots"].double(), slots.double(), 0.0)
        y = torch.zeros(self.x_CTD.shape, dtype=torch.float64, device=self.context.device)
        x, expert = self.x_CTD.double(), slots // self.num_slots
        for number in range(self.num_all):
            up, down = (weight.double() for weight in self._expert(number))
            c, t, k = (expert == number).nonzero(as_tuple=True)
            out = (x[c, t] @ up).relu() @ down
            y.index_put_((c, t), out * self.weight_CTK[c, t, k].double().unsqueeze(-1), accumulate=True)
        yield TensorComparison("y", self.outputs["y"], y, tolerance_of(self.x_CTD.dtype))

    def _expected_slots(self, c: int) -> Tensor:
        """Slots by counting on the host, token by token."""
        scores = (self.x_CTD[c].float() @ self.gate_DE).softmax(dim=-1)
        fill = [0] * self.num_all
        slots = []
        for experts in scores.topk(NUM_ACTIVE, dim=-1).indices.tolist():
            for expert in experts:
                has_room = fill[expert] < self.num_slots
                place = expert * self.num_slots + fill[expert]
                slots.append(place if has_room else self.num_all * self.num_slots)
                fill[expert] += 1
        return torch.tensor(slots, device=self.context.device).view(self.num_tokens, NUM_ACTIVE)

    def metrics(self) -> dict[str, float | None]:
        dropped = (self.outputs["slots"] == self.num_all * self.num_slots).double().mean()
        bytes_each_way = self.received[0].numel() * self.received.element_size()
        return {
            "dropped_share": float(dropped),
            "all_to_all_bytes": float(2 * NUM_CHUNKS * bytes_each_way),
            "tokens_per_expert_mean": self.num_tokens * NUM_ACTIVE * NUM_CHUNKS / self.num_all,
        }
