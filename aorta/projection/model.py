"""A model: its shapes, its parameters, its FLOPs, and its name in every spelling that sources use.

Everything else is computed from the shapes.
"""

import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import msgspec

from aorta.config.yaml_files import read_structs
from aorta.errors import ConfigError, did_you_mean
from aorta.hardware.names import packaged

Mixer = Literal["full", "window", "state", "none"]
FeedForward = Literal["dense", "moe", "none"]
KINDS: dict[str, tuple[Mixer, FeedForward]] = {
    "dense": ("full", "dense"),
    "moe": ("full", "moe"),
    "window dense": ("window", "dense"),
    "window moe": ("window", "moe"),
    "state dense": ("state", "dense"),
    "state moe": ("state", "moe"),
    "state": ("state", "none"),
    "attention": ("full", "none"),
    "mlp": ("none", "dense"),
    "experts": ("none", "moe"),
}
"""Parts of each kind of layer. A layer of most models has both; hybrids have layers with one."""
PATTERN = {"M": "state", "*": "attention", "-": "mlp", "E": "experts"}
"""Letters of a hybrid's pattern, as the configurations of Nemotron-H write it."""
MODEL_DIR = Path(__file__).resolve().parent / "models"
NOT_SHAPES = (
    "instruct|chat|base|hf|it|pt|bf16|fp16|fp8|mxfp8|nvfp4|fp4|text|model|meta|moe|dense|lora|qlora|peft|sft|dpo|"
    "pretrain|pretraining|finetune|finetuning|preview|pretrained|nemo|torchtitan"
)
"""Words of a name that say nothing about the shapes."""
LETTERS = "a-z"
WHOLE = rf"(?<![{LETTERS}0-9.])(?:{NOT_SHAPES}|v0\.\d+|\d{{4}}|\d+k)(?![{LETTERS}0-9.])"
"""Such a word, a preview's version (v0.1), a date (2407) or a context length (128k), standing alone."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention: queries, keys and values by way of narrow latents."""

    q_lora_rank: int
    """0: queries have no latent."""
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int


class StateSpace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixer with a state of fixed size instead of keys and values: Mamba-2, or gated delta rule.

    Its work is linear in the sequence: chunks of `chunk` positions attend inside, and hand on a state of
    key_dim x value_dim for each head.
    """

    num_heads: int
    value_dim: int
    """Width of a head (Mamba's head dimension)."""
    key_dim: int
    """Width of a head's key (Mamba's state size)."""
    num_key_heads: int
    """Groups that share keys and queries (Mamba's groups)."""
    conv: int = 4
    chunk: int = 128
    delta_rule: bool = False
    """Each chunk also solves a triangular system, as DeltaNet does."""

    @property
    def inner(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Columns of the projection in: values and gate, keys and queries, and one or two scalars a head."""
        scalars = (2 if self.delta_rule else 1) * self.num_heads
        return 2 * self.inner + 2 * self.num_key_heads * self.key_dim + scalars

    def flops_per_token(self) -> float:
        """Forward FLOPs of the products inside chunks and with the state."""
        inside = self.num_heads * self.chunk * (self.key_dim + self.value_dim)  # causal half of a chunk
        with_state = 4 * self.num_heads * self.key_dim * self.value_dim
        solved = 2 * self.num_heads * self.chunk * (self.key_dim + self.value_dim) if self.delta_rule else 0
        return float(inside + with_state + solved)


class ExpertShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feed-forward of the layers that route tokens."""

    num_experts: int
    num_active: int
    ffn: int
    num_shared: int = 0
    """Experts of the same width that every token passes."""
    shared_ffn: int = 0
    """Width of all shared experts together where it is not num_shared x ffn."""
    every: int = 1
    """Experts in one layer of so many, after num_dense_layers; the others keep the dense feed-forward."""
    latent: int = 0
    """Width that tokens are projected to before they travel to experts; 0: the hidden width."""
    most_nodes: int | None = None
    """Group-limited routing: experts of one token lie on at most that many groups (nodes)."""
    num_dense_layers: int = 0
    """Layers at the start that keep the dense feed-forward."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"experts.num_active must be between 1 and {self.num_experts}, got {self.num_active}"
            )

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together."""
        return self.shared_ffn or self.num_shared * self.ffn


class PublishedFlops(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """FLOPs of training a token as a vendor counts them: its TFLOP/s over its tokens per second."""

    flops_per_token: float
    seq_len: int
    source: str
    mtp: bool = False
    """Layers that predict tokens further on are trained and counted."""
    difference: str = ""
    """What the vendor counts otherwise, where that makes more than half a percent."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only language model; with nothing said one with RMSNorm, RoPE and SwiGLU."""

    name: str
    source: str
    """Source of the shapes, with the date they were read."""
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab_size: int
    head_dim: int = 0
    """0: hidden / num_heads."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gated_ffn: bool = True
    """Three matrices (SwiGLU, GeGLU); False: two with a pointwise activation between."""
    layer_norm: bool = False
    """Norms that subtract the mean and have a bias."""
    linear_bias: bool = False
    """Biases in all linear layers of the blocks."""
    norms_per_layer: int = 2
    """4 where the outputs of attention and feed-forward are normed as well."""
    positions: Literal["rotary", "learned", "other"] = "rotary"
    """other: ALiBi, or none at all; neither costs anything worth counting."""
    max_positions: int = 0
    """Rows of learned positions."""
    window: int | None = None
    """Keys that a token of a layer with a sliding window sees."""
    full_every: int = 1
    """Period of layers without the window: one in so many sees the whole sequence; 0: none."""
    sinks: bool = False
    """One learned logit per head beside the keys."""
    output_gate: bool = False
    """The attention's output is gated by a projection as wide as the queries."""
    state: StateSpace | None = None
    """Shape of layers that mix by a state space: with full_every, or where the pattern says so."""
    pattern: str = ""
    """Hybrids whose layers have one part each: M state space, * attention, - dense, E experts."""
    latent: LatentAttention | None = None
    experts: ExpertShape | None = None
    num_mtp_layers: int = 0
    """Layers beside the others that predict a token further on; trained only where a plan says so, and not
    counted in num_params."""
    aliases: tuple[str, ...] = ()
    """Other names of models with the same shapes."""
    num_params_published: int | None = None
    """Parameters of the published checkpoint, exactly."""
    num_params_rounded: int | None = None
    """Parameters as the publisher rounds them, where no checkpoint was counted."""
    flops_published: PublishedFlops | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "num_layers", "num_heads", "num_kv_heads", "ffn", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_heads {self.num_heads} must be a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.pattern and (len(self.pattern) != self.num_layers or set(self.pattern) - PATTERN.keys()):
            raise ConfigError(
                f"{self.name}: pattern must be {self.num_layers} letters of {', '.join(PATTERN)}, "
                f"got {len(self.pattern)}"
            )
        if self.pattern and "M" in self.pattern and self.state is None:
            raise ConfigError(f"{self.name}: pattern has M, but there is no state")

    @property
    def qk_dim(self) -> int:
        """Width of a head's queries and keys."""
        if self.latent:
            return self.latent.qk_nope_dim + self.latent.qk_rope_dim
        return self.head_dim or self.hidden // self.num_heads

    @property
    def v_dim(self) -> int:
        return self.latent.v_dim if self.latent else self.qk_dim

    @cached_property
    def layer_kinds(self) -> tuple[str, ...]:
        return tuple(map(self.layer_kind, range(self.num_layers)))

    @property
    def mtp_kind(self) -> str:
        """Kind of the layers that predict tokens further on."""
        return "moe" if self.experts else "dense"

    def layer_kind(self, layer: int) -> str:
        if self.pattern:
            return PATTERN[self.pattern[layer]]
        experts = self.experts
        is_moe = (
            experts is not None
            and layer >= experts.num_dense_layers
            and (layer - experts.num_dense_layers + 1) % experts.every == 0
        )
        sees_all = self.full_every > 0 and (layer + 1) % self.full_every == 0
        if sees_all or (self.window is None and self.state is None):
            return "moe" if is_moe else "dense"
        mixer = "state" if self.state is not None else "window"
        return f"{mixer} {'moe' if is_moe else 'dense'}"

    @cached_property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection."""
        h = self.hidden
        if self.latent:
            la, heads = self.latent, self.num_heads
            queries = (
                {"q_down": (h, la.q_lora_rank), "q_up": (la.q_lora_rank, heads * self.qk_dim)}
                if la.q_lora_rank
                else {"q_up": (h, heads * self.qk_dim)}
            )
            return {
                **queries,
                "kv_down": (h, la.kv_lora_rank + la.qk_rope_dim),
                "k_up": (la.kv_lora_rank, heads * la.qk_nope_dim),
                "v_up": (la.kv_lora_rank, heads * la.v_dim),
                "out": (heads * la.v_dim, h),
            }
        queries_wide = self.num_heads * self.qk_dim
        return {
            "query": (h, queries_wide * (2 if self.output_gate else 1)),
            "key": (h, self.num_kv_heads * self.qk_dim),
            "value": (h, self.num_kv_heads * self.qk_dim),
            "out": (queries_wide, h),
        }

    @cached_property
    def attention_params(self) -> int:
        """Projections with biases and the norms inside the attention."""
        params = sum(rows * columns for rows, columns in self.attention_matrices.values())
        if self.qkv_bias or self.linear_bias:
            params += (self.num_heads + 2 * self.num_kv_heads) * self.qk_dim
        if self.linear_bias:
            params += self.hidden
        if self.qk_norm:
            params += 2 * self.qk_dim
        if self.sinks:
            params += self.num_heads
        if self.latent:
            params += self.latent.q_lora_rank + self.latent.kv_lora_rank
        return params

    @property
    def state_matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the projections of a layer with a state space."""
        assert self.state is not None
        return {"state_in": (self.hidden, self.state.projected), "state_out": (self.state.inner, self.hidden)}

    @property
    def state_params(self) -> int:
        state = self.state
        if state is None:
            return 0
        params = sum(rows * columns for rows, columns in self.state_matrices.values())
        convolved = state.inner + 2 * state.num_key_heads * state.key_dim
        per_head = (2 if state.delta_rule else 3) * state.num_heads
        if state.delta_rule:  # a norm over one head, a convolution without bias
            return params + convolved * state.conv + per_head + state.value_dim
        return params + convolved * (state.conv + 1) + per_head + state.inner

    @property
    def ffn_matrices(self) -> int:
        return 3 if self.gated_ffn else 2

    @property
    def dense_ffn_params(self) -> int:
        biases = self.ffn * (self.ffn_matrices - 1) + self.hidden if self.linear_bias else 0
        return self.ffn_matrices * self.hidden * self.ffn + biases

    @property
    def expert_params(self) -> int:
        if self.experts is None:
            return 0
        width = self.experts.latent or self.hidden
        biases = self.experts.ffn * (self.ffn_matrices - 1) + self.hidden if self.linear_bias else 0
        return self.ffn_matrices * width * self.experts.ffn + biases

    @property
    def norm_params(self) -> int:
        return self.hidden * (2 if self.layer_norm else 1)

    def mixer_params(self, kind: str) -> int:
        """Parameters of a layer's attention or state space, without its norms."""
        mixer = KINDS[kind][0]
        if mixer == "none":
            return 0
        return self.state_params if mixer == "state" else self.attention_params

    def layer_params(self, kind: str) -> int:
        """Attention, feed-forward and the norms of a layer of one of KINDS."""
        mixer, feed_forward = KINDS[kind]
        parts = (mixer != "none") + (feed_forward != "none")
        params = self.mixer_params(kind) + parts * self.norms_per_layer // 2 * self.norm_params
        if feed_forward == "none":
            return params
        if feed_forward == "dense" or self.experts is None:
            return params + self.dense_ffn_params
        experts = self.experts
        router = self.hidden * experts.num_experts + (experts.num_experts if self.linear_bias else 0)
        shared = self.ffn_matrices * self.hidden * experts.shared_width
        shared += 2 * experts.latent * self.hidden
        return params + router + experts.num_experts * self.expert_params + shared

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden

    @cached_property
    def num_params(self) -> int:
        """All trained parameters; tied embeddings count once."""
        layers = sum(self.layer_params(kind) for kind in self.layer_kinds)
        embeddings = self.embedding_params * (1 if self.tied_embeddings else 2)
        return layers + embeddings + self.norm_params + self.max_positions * self.hidden

    def layer_matrix_params(self, kind: str) -> int:
        """Parameters of the matrices that one token passes in a layer of one of KINDS, with the router."""
        mixer, feed_forward = KINDS[kind]
        matrices = {"none": {}, "state": self.state_matrices if self.state else {}}.get(
            mixer, self.attention_matrices
        )
        params = sum(rows * columns for rows, columns in matrices.values())
        if feed_forward == "dense":
            params += self.ffn_matrices * self.hidden * self.ffn
        elif feed_forward == "moe" and self.experts is not None:
            experts = self.experts
            width = experts.latent or self.hidden
            params += self.ffn_matrices * (
                experts.num_active * width * experts.ffn + self.hidden * experts.shared_width
            )
            params += self.hidden * (experts.num_experts + 2 * experts.latent)
        return params

    def matrix_flops_per_token(self) -> int:
        """Forward FLOPs per token in matrix multiplies with weights, the output layer included."""
        layers = sum(num * self.layer_matrix_params(kind) for kind, num in Counter(self.layer_kinds).items())
        return 2 * (self.embedding_params + layers)

    def attention_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token in QK^T and PV, the causal mask leaves half; and in state spaces."""
        return sum(n * self.layer_attention_flops(k, seq_len) for k, n in Counter(self.layer_kinds).items())

    def layer_attention_flops(self, kind: str, seq_len: int) -> float:
        """The same of a layer of one of KINDS."""
        mixer = KINDS[kind][0]
        if mixer == "none":
            return 0.0
        if mixer == "state" and self.state is not None:
            return self.state.flops_per_token()
        per_key = 2.0 * self.num_heads * (self.qk_dim + self.v_dim)
        return per_key * mean_keys(seq_len, self.window if mixer == "window" else None)

    def train_flops_per_token(self, seq_len: int, frozen: bool = False, mtp: bool = False) -> float:
        """FLOPs of the forward and backward pass (twice the forward), nothing recomputed.

        Frozen weights have no gradient of their own, only that of their input: 4 FLOPs per token instead of
        6. Attention has no weights, its backward pass stays what it is. mtp: with the layers that predict
        tokens further on, each with the matrix that joins its inputs and the output layer again.
        """
        matrices, attention = self.matrix_flops_per_token(), self.attention_flops_per_token(seq_len)
        if mtp:
            joined = 2 * self.hidden**2 + self.layer_matrix_params(self.mtp_kind) + self.embedding_params
            matrices += 2 * self.num_mtp_layers * joined
            attention += self.num_mtp_layers * self.layer_attention_flops(self.mtp_kind, seq_len)
        return (2 if frozen else 3) * matrices + 3 * attention

    def flops_beside_published_pct(self) -> float | None:
        """Own count of the FLOPs per token beside the vendor's, in percent; None: the vendor states none."""
        published = self.flops_published
        if published is None:
            return None
        own = self.train_flops_per_token(published.seq_len, mtp=published.mtp)
        return (own / published.flops_per_token - 1) * 100


def mean_keys(seq_len: int, window: int | None) -> float:
    """Keys that a token sees on average under the causal mask, and the window where there is one."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window - window**2 / (2 * seq_len)


def load_model(name_or_path: str) -> Model:
    """A model of aorta/projection/models by name or alias, or of a YAML file."""
    path = packaged(Path(name_or_path), "models", MODEL_DIR)
    is_named_as_file = path.suffix in (".yaml", ".yml")
    if is_named_as_file and not path.exists():
        file_names = ", ".join(sorted(file.name for file in path.parent.glob("*.yaml")))
        raise ConfigError(f"{path}: no such model file{f', there is {file_names}' if file_names else ''}")
    file = path if is_named_as_file else model_file(name_or_path)
    if file is not None:
        return read_structs(file, Model)
    if path.is_file():
        form = "give a YAML file of the form of aorta/projection/models, such as llama3-8b.yaml"
        raise ConfigError(f"--model {name_or_path}: not a model file by its name; {form}")
    count = len(set(model_files().values()))
    hint = did_you_mean(
        name_or_path.lower(), known_names(), f"; aorta/projection/models has {count}, such as llama3-8b"
    )
    raise ConfigError(f"--model {name_or_path} is not known{hint}")


def model_file(name: str) -> Path | None:
    """The packaged file of a name; qwen2_5-7b and llama3p1-8b are tried as 2.5 and 3.1."""
    files = model_files()
    return files.get(name_key(name)) or files.get(
        name_key(re.sub(r"(?<=\d)[_p](?=\d)", ".", name.lower(), count=1))
    )


@cache
def model_files() -> Mapping[tuple[str, ...], Path]:
    """The file of every packaged model by the key of its name and of its aliases, without reading shapes."""
    files: dict[tuple[str, ...], Path] = {}
    for path in sorted(MODEL_DIR.glob("*.yaml")):
        for name in (path.stem, *_aliases(path)):
            files[name_key(name)] = path
    return files


def known_names() -> list[str]:
    """Every name and alias as the files write it."""
    return [name for path in sorted(MODEL_DIR.glob("*.yaml")) for name in (path.stem, *_aliases(path))]


def _aliases(path: Path) -> list[str]:
    listed = re.search(r"^aliases: \[(.*)\]$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [alias.strip() for alias in listed[1].split(",")] if listed else []


def name_key(name: str) -> tuple[str, ...]:
    """Letters and numbers of a name, without the owner and what different sources write differently.

    Llama-3.1-8B is llama3.1-8b, but llama3-3b is not llama-33b: two numbers stay two.
    """
    plain = name.lower().rstrip("/").rpartition("/")[2]
    shapes = re.sub(WHOLE, "", plain)
    joined = re.sub(rf"(?<=[{LETTERS}])[^{LETTERS}0-9]+(?=[{LETTERS}])", "", shapes)
    return tuple(re.findall(rf"[{LETTERS}]+|\d+(?:\.\d+)?", joined))


@cache
def models() -> dict[str, Model]:
    """Every model of aorta/projection/models by name."""
    loaded = (read_structs(path, Model) for path in sorted(MODEL_DIR.glob("*.yaml")))
    return {model.name: model for model in loaded}
