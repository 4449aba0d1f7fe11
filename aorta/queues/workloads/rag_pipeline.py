"""Retrieval-augmented generation: embed, retrieve, rerank, generate.

G groups of queries, Q queries of one, W words of a query, N documents, D their dim, C candidates of a query,
K of them chosen, S generated tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from aorta.queues.workload import Amount
from aorta.queues.workloads import decoder
from aorta.queues.workloads.decoder import Decoder, DecoderShape
from aorta.queues.workloads.inputs_and_checks import CheckedWorkload, Inputs, TensorComparison, tolerance_of
from aorta.queues.workloads.ordering import Dataflow, stage_stream

NUM_GROUPS = 8
NUM_STAGES = 4
NUM_CANDIDATES = 16
NUM_CHOSEN = 4
NUM_GENERATED = 4
QUERIES = {"full": 64, "small": 2}
WORDS = {"full": 64, "small": 8}
DOCUMENTS = {"full": 1 << 20, "small": 256}
SHAPE = {
    "full": DecoderShape(num_layers=1, num_heads=64, head_dim=128, vocab_size=32000),
    "small": DecoderShape(num_layers=1, num_heads=2, head_dim=8, vocab_size=32),
}
DIM = {"full": 512, "small": 16}
KERNELS_OF_SEARCH = 20


class RagPipeline(CheckedWorkload):
    """outputs: vectors [G, Q, D], candidates [G, Q, C] (documents), chosen [G, Q, K] (places among the
    candidates), tokens [G, Q, S], logits [G, Q, S, V]."""

    name = "rag_pipeline"
    priority = "P2"
    unit = "queries"
    question = "Do the stages of different queries run beside each other?"
    stream_meaning = (
        f"{NUM_STAGES} stages with N/{NUM_STAGES} streams each (below {NUM_STAGES}, stages share streams); "
        f"{NUM_GROUPS} groups of queries are dealt to the streams of a stage."
    )
    max_streams = NUM_STAGES * NUM_GROUPS

    def setup(self) -> None:
        context, size = self.context, self.context.size
        self.shape, self.num_documents = SHAPE[size], DOCUMENTS[size]
        num_queries, dim, rank = QUERIES[size], DIM[size], context.rank
        inputs = Inputs(context)
        self.model = Decoder(inputs, self.shape)
        vocab_size, wide = self.shape.vocab_size, 4 * dim
        self.words = inputs.integers("words", (NUM_GROUPS, num_queries, WORDS[size]), vocab_size, rank)
        self.word_vectors = inputs.normal("word vectors", (vocab_size, dim))
        self.embed_up, self.embed_down = inputs.weight("up", dim, wide), inputs.weight("down", wide, dim)
        self.documents_ND = inputs.normal("documents", (self.num_documents, dim), dim**-0.5)
        self.rank_up = inputs.weight("rank up", dim, wide)
        self.rank_down = inputs.weight("rank down", wide, 1)
        self.project = inputs.weight("project", dim, self.shape.dim).mul_(dim**0.5)
        shape = (NUM_GROUPS, num_queries)
        self.outputs = {
            "vectors": inputs.zeros((*shape, dim)),
            "candidates": self._no_places(*shape, NUM_CANDIDATES),
            "chosen": self._no_places(*shape, NUM_CHOSEN),
            "tokens": self._no_places(*shape, NUM_GENERATED),
            "logits": inputs.zeros((*shape, NUM_GENERATED, vocab_size)),
        }
        num_tokens = NUM_CHOSEN + NUM_GENERATED
        self.caches = [self.model.cache(f"{g}", num_queries, num_tokens, rank) for g in range(NUM_GROUPS)]
        self.mask = self.model.causal_mask(NUM_CHOSEN, 0)
        self.flow = Dataflow(context)

    def _no_places(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self.context.device)

    def iteration(self, index: int) -> None:
        stages: list[tuple[str, Callable[[int], None], list[str], list[str]]] = [
            ("embed", self._embed, [], ["vectors"]),
            ("retrieve", self._retrieve, ["vectors"], ["candidates"]),
            ("rerank", self._rerank, ["vectors", "candidates"], ["chosen"]),
            ("generate", self._generate, ["candidates", "chosen"], []),
        ]
        # In the order of a full pipeline: what is submitted first can also start first.
        for turn in range(NUM_GROUPS + NUM_STAGES - 1):
            for stage, (name, work, reads, writes) in enumerate(stages):
                g = turn - stage
                if 0 <= g < NUM_GROUPS:
                    stream = stage_stream(stage, g, NUM_STAGES, self.context.num_streams)
                    self.flow.put(
                        stream,
                        name,
                        partial(work, g),
                        [(buffer, g) for buffer in reads],
                        [(buffer, g) for buffer in writes],
                    )

    def _embed(self, g: int) -> None:
        mean = embedding(self.words[g], self.word_vectors).mean(dim=1)
        hidden = (mean @ self.embed_up).relu_()
        self.outputs["vectors"][g].copy_(torch.nn.functional.normalize(hidden @ self.embed_down, dim=-1))

    def _retrieve(self, g: int) -> None:
        scores_QN = self.outputs["vectors"][g] @ self.documents_ND.t()
        self.outputs["candidates"][g].copy_(scores_QN.topk(NUM_CANDIDATES, dim=-1).indices)

    def _rerank(self, g: int) -> None:
        found_QCD = embedding(self.outputs["candidates"][g], self.documents_ND)
        pairs = found_QCD * self.outputs["vectors"][g].unsqueeze(1)
        scores_QC = ((pairs @ self.rank_up).relu_() @ self.rank_down).squeeze(-1)
        self.outputs["chosen"][g].copy_(scores_QC.topk(NUM_CHOSEN, dim=-1).indices)

    def _generate(self, g: int) -> None:
        """The chosen documents as the prompt's tokens, then token after token."""
        x = self._prompt(g)
        for step in range(NUM_GENERATED):
            past = 0 if step == 0 else NUM_CHOSEN + step - 1
            logits = self.model.forward(x, self.caches[g], past, None if step else self.mask)[:, -1]
            tokens = decoder.tokens_of(logits)
            self.outputs["logits"][g][:, step].copy_(logits)
            self.outputs["tokens"][g][:, step].copy_(tokens)
            x = self.model.embed(tokens.unsqueeze(-1))

    def _prompt(self, g: int) -> Tensor:
        places = self.outputs["chosen"][g].clamp(0, NUM_CANDIDATES - 1)
        documents = self.outputs["candidates"][g].clamp(0, self.num_documents - 1).gather(1, places)
        return embedding(documents, self.documents_ND) @ self.project

    def amount(self) -> Amount:
        num_queries = self.words[:, :, 0].numel()
        generate = decoder.num_kernels(NUM_GENERATED, self.shape.num_layers)
        return Amount(NUM_GROUPS * (KERNELS_OF_SEARCH + generate), num_queries, num_queries)

    def comparisons(self) -> Iterable[TensorComparison]:
        """Each stage from what the stage before it really gave: a document that just makes it, or just does
        not, is a matter of rounding, and the ones with the best scores are not."""
        tolerance = tolerance_of(self.documents_ND.dtype)
        tokens, logits = self.outputs["tokens"], self.outputs["logits"]
        for g in range(NUM_GROUPS):
            yield TensorComparison(
                f"vectors of group {g}", self.outputs["vectors"][g], self._vectors(g), tolerance
            )
            yield from self._compare_choices(g, tolerance)
            generated = self.model.embed(tokens[g].clamp(0, self.shape.vocab_size - 1))[:, :-1]
            x = torch.cat([self._prompt(g), generated], dim=1)
            expected = self.model.reference(x)[:, NUM_CHOSEN - 1 :]
            yield TensorComparison(f"logits of group {g}", logits[g], expected, tolerance)
        yield TensorComparison("tokens", tokens.double(), decoder.tokens_of(logits).double(), 0.0)

    def _vectors(self, g: int) -> Tensor:
        mean = self.word_vectors.double()[self.words[g]].mean(dim=1)
        vectors = (mean @ self.embed_up.double()).relu() @ self.embed_down.double()
        return vectors / vectors.square().sum(dim=-1, keepdim=True).sqrt()

    def _compare_choices(self, g: int, tolerance: float) -> Iterable[TensorComparison]:
        vectors = self.outputs["vectors"][g].double()
        scores = torch.cat([vectors @ part.double().t() for part in self.documents_ND.split(1 << 16)], dim=1)
        yield _best(f"candidates of group {g}", scores, self.outputs["candidates"][g], tolerance)
        candidates = self.outputs["candidates"][g].clamp(0, self.num_documents - 1)
        pairs = self.documents_ND[candidates].double() * vectors.unsqueeze(1)
        again = ((pairs @ self.rank_up.double()).relu() @ self.rank_down.double()).squeeze(-1)
        yield _best(f"chosen of group {g}", again, self.outputs["chosen"][g], tolerance)


def _best(name: str, scores: Tensor, chosen: Tensor, tolerance: float) -> TensorComparison:
    """Check that the chosen places have the best scores, each once; absent places score nothing."""
    exists = (chosen >= 0) & (chosen < scores.shape[1])
    ordered = chosen.sort(dim=1).values
    once = torch.ones_like(exists)
    once[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    gathered = scores.gather(1, chosen.clamp(0, scores.shape[1] - 1))
    gathered = torch.where(exists.all() & once.all(), gathered, torch.nan)
    best = scores.topk(chosen.shape[1], dim=1).values
    return TensorComparison(name, gathered.sort(dim=1, descending=True).values, best, tolerance)
