"""A draft that proposes tokens one by one, and a verification that reads them all at once.

G groups of requests, B requests of one, K proposed tokens. The draft is the first layer of the model (early
exit), so that some of its proposals are accepted. Every iteration starts from the same context.
"""

from collections.abc import Iterable
from functools import partial

import torch

from aorta.queues.workload import Amount
from aorta.queues.workloads import decoder
from aorta.queues.workloads.decoder import Decoder, DecoderShape
from aorta.queues.workloads.inputs_and_checks import CheckedWorkload, Inputs, TensorComparison, tolerance_of
from aorta.queues.workloads.ordering import Dataflow, deal_streams

NUM_GROUPS = 8
NUM_PROPOSED = 4
DRAFT_LAYERS = 1
SHAPE = {
    "full": DecoderShape(num_layers=4, num_heads=64, head_dim=128, vocab_size=32000),
    "small": DecoderShape(num_layers=3, num_heads=2, head_dim=16, vocab_size=64),
}
REQUESTS = {"full": 4, "small": 2}
CONTEXT = {"full": 1024, "small": 16}
LATE_LAYER_WEIGHT = 0.2
"""Weight of later layers: the draft's proposals are accepted more often than not, but not always."""


class SpeculativeDecode(CheckedWorkload):
    """outputs: tokens [G, B, 1 + K] (the last one known, then the proposals), draft_logits [G, B, K, V],
    logits [G, B, 1 + K, V] of the verification, accepted [G, B]."""

    name = "speculative_decode"
    priority = "P1"
    unit = "tokens"
    question = "Do drafts of some requests run beside the verification of others?"
    stream_meaning = (
        f"{NUM_GROUPS} groups of requests dealt to streams that verify and to streams that draft, half of N "
        "each."
    )
    min_streams = 2
    max_streams = 2 * NUM_GROUPS

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.shape, self.num_requests, self.num_past = SHAPE[size], REQUESTS[size], CONTEXT[size]
        self.verify_streams, self.draft_streams = deal_streams(context.num_streams, [NUM_GROUPS] * 2)
        inputs, rank = Inputs(context), context.rank
        self.model = Decoder(inputs, self.shape, LATE_LAYER_WEIGHT)
        num_tokens = self.num_past + 1 + NUM_PROPOSED
        self.caches = [
            self.model.cache(f"group {g}", self.num_requests, num_tokens, rank) for g in range(NUM_GROUPS)
        ]
        # The draft's own: it runs ahead while the other may still be read.
        self.draft_caches = [
            decoder.Cache(cache.keys[:DRAFT_LAYERS].clone(), cache.values[:DRAFT_LAYERS].clone())
            for cache in self.caches
        ]
        self.mask = self.model.causal_mask(1 + NUM_PROPOSED, self.num_past)
        shape, vocab_size = (NUM_GROUPS, self.num_requests), self.shape.vocab_size
        context_tokens = inputs.integers("known", (*shape, 1), vocab_size, rank)
        self.outputs = {
            "tokens": context_tokens.repeat(1, 1, 1 + NUM_PROPOSED),
            "draft_logits": inputs.zeros((*shape, NUM_PROPOSED, vocab_size)),
            "logits": inputs.zeros((*shape, 1 + NUM_PROPOSED, vocab_size)),
            "accepted": torch.zeros(shape, dtype=torch.int64, device=context.device),
        }
        self.flow = Dataflow(context)
        for g in range(NUM_GROUPS):  # one pass, to know how many tokens an iteration yields
            self._draft(g)
            self._verify(g)
        self.num_yielded = int(self.outputs["accepted"].sum()) + self.outputs["accepted"].numel()
        # What is checked later must be the iterations' own.
        self.outputs["tokens"][:, :, 1:] = 0
        for name in ("draft_logits", "logits", "accepted"):
            self.outputs[name].zero_()

    def iteration(self, index: int) -> None:
        for g in range(NUM_GROUPS):
            stream = self.draft_streams[g % len(self.draft_streams)]
            self.flow.put(stream, "draft", partial(self._draft, g), writes=[("tokens", g)])
        for g in range(NUM_GROUPS):
            stream = self.verify_streams[g % len(self.verify_streams)]
            self.flow.put(stream, "verify", partial(self._verify, g), reads=[("tokens", g)])

    def _draft(self, g: int) -> None:
        tokens, logits = self.outputs["tokens"][g], self.outputs["draft_logits"][g]
        for step in range(NUM_PROPOSED):
            x = self.model.embed(tokens[:, step : step + 1])
            past = self.num_past + step
            drafted = self.model.forward(x, self.draft_caches[g], past, num_layers=DRAFT_LAYERS)[:, 0]
            logits[:, step].copy_(drafted)
            tokens[:, step + 1].copy_(decoder.tokens_of(drafted))

    def _verify(self, g: int) -> None:
        """A proposal counts where it and all before it are what the whole model says."""
        tokens, logits = self.outputs["tokens"][g], self.outputs["logits"][g]
        logits.copy_(self.model.forward(self.model.embed(tokens), self.caches[g], self.num_past, self.mask))
        agrees = tokens[:, 1:] == decoder.tokens_of(logits)[:, :-1]
        self.outputs["accepted"][g].copy_(agrees.long().cumprod(dim=1).sum(dim=1))

    def amount(self) -> Amount:
        drafts = decoder.num_kernels(NUM_GROUPS * NUM_PROPOSED, DRAFT_LAYERS)
        verifications = decoder.num_kernels(NUM_GROUPS, self.shape.num_layers)
        num_requests = NUM_GROUPS * self.num_requests
        return Amount(drafts + verifications, samples=num_requests, units=self.num_yielded)

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance = tolerance_of(self.model.head_DV.dtype)
        tokens, accepted = self.outputs["tokens"], self.outputs["accepted"]
        for g in range(NUM_GROUPS):
            x = self.model.embed(tokens[g].clamp(0, self.shape.vocab_size - 1))
            past = self.caches[g].past(self.num_past)
            draft = self.model.reference(x[:, :-1], past, DRAFT_LAYERS)
            yield TensorComparison(
                f"draft_logits of group {g}", self.outputs["draft_logits"][g], draft, tolerance
            )
            logits = self.model.reference(x, past)
            yield TensorComparison(f"logits of group {g}", self.outputs["logits"][g], logits, tolerance)
        # Which logit is largest is a matter of rounding; that the token is that of the largest one is not.
        proposed, verified = (decoder.tokens_of(self.outputs[name]) for name in ("draft_logits", "logits"))
        yield TensorComparison("tokens", tokens[:, :, 1:].double(), proposed.double(), 0.0)
        counted = [
            [_common_prefix(ours[1:], reference) for ours, reference in zip(*of_group, strict=True)]
            for of_group in zip(tokens.tolist(), verified.tolist(), strict=True)
        ]
        expected = torch.tensor(counted, dtype=torch.float64, device=accepted.device)
        yield TensorComparison("accepted", accepted.double(), expected, 0.0)

    def metrics(self) -> dict[str, float | None]:
        accepted = self.outputs["accepted"].double()
        return {"accepted_of_proposed": float(accepted.mean()) / NUM_PROPOSED}


def _common_prefix(ours: list[int], reference: list[int]) -> int:
    """Number of leading tokens that are equal."""
    for place, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return place
    return len(ours)
