"""Requests that are read (prefill) beside requests that are answered token by token (decode).

G groups of B sequences that decode, Q new requests of S tokens each. A new request decodes its first token as
soon as it has been read. Decode reads the weights and all keys and values of its sequences for a single token
each: it is bound by memory, prefill by arithmetic.
"""

from collections.abc import Iterable
from functools import partial

import torch

from aorta.queues.workload import Amount, DeviceWork
from aorta.queues.workloads import decoder
from aorta.queues.workloads.decoder import Decoder, DecoderShape
from aorta.queues.workloads.inputs_and_checks import (
    CheckedWorkload,
    Inputs,
    TensorComparison,
    matrix_work,
    tolerance_of,
)
from aorta.queues.workloads.ordering import Dataflow

NUM_GROUPS = 12
NUM_NEW = 4
SHAPE = {
    "full": DecoderShape(num_layers=2, num_heads=64, head_dim=128, vocab_size=32000),
    "small": DecoderShape(num_layers=2, num_heads=2, head_dim=16, vocab_size=64),
}
SEQUENCES = {"full": 2, "small": 2}
PAST = {"full": 16384, "small": 32}
PROMPT = {"full": 512, "small": 12}


class ContinuousBatch(CheckedWorkload):
    """outputs: decode_logits [G, B, V]; prefill_logits [Q, V] of each prompt's last token, first_tokens [Q]
    that follow from them, and joined_logits [Q, V] after these."""

    name = "continuous_batch"
    priority = "P1"
    unit = "tokens"
    question = "Does memory-bound decode run beside the prefill of new requests, at whose cost?"
    stream_meaning = (
        f"N/4 streams (1 to {NUM_NEW}) read {NUM_NEW} new requests; {NUM_GROUPS} groups that decode, and "
        "then the new requests, are dealt to the others."
    )
    min_streams = 2
    max_streams = NUM_NEW + NUM_GROUPS + NUM_NEW

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.shape, self.num_past, self.num_prompt = SHAPE[size], PAST[size], PROMPT[size]
        self.num_prefill_streams = max(1, min(NUM_NEW, context.num_streams // 4))
        inputs, rank, num_sequences = Inputs(context), context.rank, SEQUENCES[size]
        self.model = Decoder(inputs, self.shape)
        self.caches = [
            self.model.cache(f"group {g}", num_sequences, self.num_past + 1, rank) for g in range(NUM_GROUPS)
        ]
        self.new_caches = [
            self.model.cache(f"request {q}", 1, self.num_prompt + 1, rank) for q in range(NUM_NEW)
        ]
        vocab_size = self.shape.vocab_size
        self.tokens = inputs.integers("tokens", (NUM_GROUPS, num_sequences, 1), vocab_size, rank)
        self.prompts = inputs.integers("prompts", (NUM_NEW, 1, self.num_prompt), vocab_size, rank)
        self.mask = self.model.causal_mask(self.num_prompt, 0)
        self.outputs = {
            "decode_logits": inputs.zeros((NUM_GROUPS, num_sequences, vocab_size)),
            "prefill_logits": inputs.zeros((NUM_NEW, vocab_size)),
            "first_tokens": torch.zeros(NUM_NEW, dtype=torch.int64, device=context.device),
            "joined_logits": inputs.zeros((NUM_NEW, vocab_size)),
        }
        self.flow = Dataflow(context)

    def iteration(self, index: int) -> None:
        for q in range(NUM_NEW):
            stream = q % self.num_prefill_streams
            self.flow.put(stream, "prefill", partial(self._prefill, q), writes=[("request", q)])
        for g in range(NUM_GROUPS):
            self.context.span(self._decode_stream(g), "decode", partial(self._decode, g))
        for q in range(NUM_NEW):
            stream = self._decode_stream(NUM_GROUPS + q)
            self.flow.put(stream, "decode first", partial(self._join, q), writes=[("request", q)])

    def _decode_stream(self, item: int) -> int:
        first = self.num_prefill_streams
        return first + item % (self.context.num_streams - first)

    def _prefill(self, q: int) -> None:
        logits = self.model.forward(self.model.embed(self.prompts[q]), self.new_caches[q], 0, self.mask)
        self.outputs["prefill_logits"][q].copy_(logits[0, -1])
        self.outputs["first_tokens"][q].copy_(decoder.tokens_of(logits[0, -1]))

    def _decode(self, g: int) -> None:
        logits = self.model.forward(self.model.embed(self.tokens[g]), self.caches[g], self.num_past)
        self.outputs["decode_logits"][g].copy_(logits[:, 0])

    def _join(self, q: int) -> None:
        x = self.model.embed(self.outputs["first_tokens"][q].view(1, 1))
        logits = self.model.forward(x, self.new_caches[q], self.num_prompt)
        self.outputs["joined_logits"][q].copy_(logits[0, 0])

    def amount(self) -> Amount:
        num_calls = NUM_GROUPS + 2 * NUM_NEW
        num_sequences = self.tokens[:, :, 0].numel() + NUM_NEW
        kernels = decoder.num_kernels(num_calls, self.shape.num_layers)
        return Amount(kernels, samples=num_sequences, units=num_sequences + NUM_NEW)

    def device_work(self) -> DeviceWork:
        """Work of the layers and their caches; attention and the vocabulary are left out."""
        num_weights = 12.0 * self.shape.num_layers * self.shape.dim**2
        num_tokens = self.tokens.numel() + self.prompts.numel() + NUM_NEW
        num_reads = NUM_GROUPS + 2 * NUM_NEW
        weight_bytes = num_weights * self.model.head_DV.element_size()
        cache_bytes = sum(cache.num_bytes for cache in self.caches)
        flops = 2.0 * num_weights * num_tokens
        return matrix_work(self.model.head_DV.dtype, flops, num_reads * weight_bytes + cache_bytes)

    def comparisons(self) -> Iterable[TensorComparison]:
        tolerance = tolerance_of(self.model.head_DV.dtype)
        for g in range(NUM_GROUPS):
            past = self.caches[g].past(self.num_past)
            logits = self.model.reference(self.model.embed(self.tokens[g]), past)[:, 0]
            name = f"decode_logits of group {g}"
            yield TensorComparison(name, self.outputs["decode_logits"][g], logits, tolerance)
        first = self.outputs["first_tokens"]
        said = decoder.tokens_of(self.outputs["prefill_logits"])
        yield TensorComparison("first_tokens", first.double(), said.double(), 0.0)
        tokens = torch.cat([self.prompts[:, 0], first.clamp(0, self.shape.vocab_size - 1)[:, None]], dim=1)
        for q in range(NUM_NEW):  # prompt and first token in one go, without a cache
            logits = self.model.reference(self.model.embed(tokens[q : q + 1]))[0]
            prefill, joined = self.outputs["prefill_logits"][q], self.outputs["joined_logits"][q]
            yield TensorComparison(f"prefill_logits of request {q}", prefill, logits[-2], tolerance)
            yield TensorComparison(f"joined_logits of request {q}", joined, logits[-1], tolerance)

    def metrics(self) -> dict[str, float | None]:
        return {
            "num_prefill_streams": float(self.num_prefill_streams),
            "cache_bytes_read": float(sum(cache.num_bytes for cache in self.caches)),
        }
