"""What a model is: its shapes, its parameters, its FLOPs. Everything else is worked out from these."""

from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from aorta.errors import ConfigError
from aorta.hardware.names import packaged
from aorta.hardware.strict import convert, near, read_yaml

MODEL_DIR = Path(__file__).resolve().parent / "models"


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-head latent attention: queries, keys and values by way of narrow latents."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feed-forward of the layers that route tokens."""

    num_experts: int
    num_active: int
    ffn: int
    num_shared: int = 0
    """Experts of the same width that every token passes."""
    most_nodes: int | None = None
    """Group-limited routing: experts of one token lie on at most that many groups (nodes)."""
    num_dense_layers: int = 0
    """Layers at the start that keep the dense feed-forward."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"experts.num_active must be between 1 and {self.num_experts}, got {self.num_active}"
            )


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only language model with RMSNorm, RoPE and SwiGLU."""

    name: str
    source: str
    """Where the shapes come from, with the date they were read."""
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
    latent: LatentAttention | None = None
    experts: Experts | None = None
    num_mtp_layers: int = 0
    """Layers beside the others that predict a token further on; trained only where a plan says so, and not
    counted in num_params."""
    aliases: tuple[str, ...] = ()
    """Other names of models with the same shapes."""
    num_params_published: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "num_layers", "num_heads", "num_kv_heads", "ffn", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.name}: num_heads {self.num_heads} must be a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )

    @property
    def qk_dim(self) -> int:
        """Per head, of queries and keys."""
        if self.latent:
            return self.latent.qk_nope_dim + self.latent.qk_rope_dim
        return self.head_dim or self.hidden // self.num_heads

    @property
    def v_dim(self) -> int:
        return self.latent.v_dim if self.latent else self.qk_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.experts.num_dense_layers if self.experts else 0

    def layer_kind(self, layer: int) -> Literal["dense", "moe"]:
        return "moe" if self.experts and layer >= self.experts.num_dense_layers else "dense"

    @cached_property
    def attention_matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection."""
        h = self.hidden
        if self.latent:
            la, heads = self.latent, self.num_heads
            return {
                "q_down": (h, la.q_lora_rank),
                "q_up": (la.q_lora_rank, heads * self.qk_dim),
                "kv_down": (h, la.kv_lora_rank + la.qk_rope_dim),
                "k_up": (la.kv_lora_rank, heads * la.qk_nope_dim),
                "v_up": (la.kv_lora_rank, heads * la.v_dim),
                "out": (heads * la.v_dim, h),
            }
        return {
            "query": (h, self.num_heads * self.qk_dim),
            "key": (h, self.num_kv_heads * self.qk_dim),
            "value": (h, self.num_kv_heads * self.qk_dim),
            "out": (self.num_heads * self.qk_dim, h),
        }

    @cached_property
    def attention_params(self) -> int:
        """Projections with biases and the norms inside the attention."""
        params = sum(rows * columns for rows, columns in self.attention_matrices.values())
        if self.qkv_bias:
            params += (self.num_heads + 2 * self.num_kv_heads) * self.qk_dim
        if self.qk_norm:
            params += 2 * self.qk_dim
        if self.latent:
            params += self.latent.q_lora_rank + self.latent.kv_lora_rank
        return params

    @property
    def dense_ffn_params(self) -> int:
        return 3 * self.hidden * self.ffn

    @property
    def expert_params(self) -> int:
        """Of one expert."""
        return 3 * self.hidden * self.experts.ffn if self.experts else 0

    def layer_params(self, kind: Literal["dense", "moe"]) -> int:
        """Attention, feed-forward and the two norms."""
        params = self.attention_params + 2 * self.hidden
        if kind == "dense" or self.experts is None:
            return params + self.dense_ffn_params
        experts = self.experts
        router = self.hidden * experts.num_experts
        return params + router + (experts.num_experts + experts.num_shared) * self.expert_params

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden

    @cached_property
    def num_params(self) -> int:
        """All trained parameters; tied embeddings count once."""
        layers = sum(self.layer_params(self.layer_kind(layer)) for layer in range(self.num_layers))
        embeddings = self.embedding_params * (1 if self.tied_embeddings else 2)
        return layers + embeddings + self.hidden

    @cached_property
    def num_active_params(self) -> int:
        """Parameters that one token passes, embeddings included."""
        if self.experts is None:
            return self.num_params
        idle = self.experts.num_experts - self.experts.num_active
        return self.num_params - self.num_moe_layers * idle * self.expert_params

    def matrix_flops_per_token(self) -> int:
        """Forward FLOPs per token in matrix multiplies with weights, the output layer included."""
        attention = sum(rows * columns for rows, columns in self.attention_matrices.values())
        params = self.num_layers * attention + self.embedding_params
        params += (self.num_layers - self.num_moe_layers) * self.dense_ffn_params
        if self.experts:
            active = self.experts.num_active + self.experts.num_shared
            params += self.num_moe_layers * (
                active * self.expert_params + self.hidden * self.experts.num_experts
            )
        return 2 * params

    def attention_flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token in QK^T and PV; the causal mask leaves half."""
        return self.num_layers * self.num_heads * (self.qk_dim + self.v_dim) * float(seq_len)

    def train_flops_per_token(self, seq_len: int, frozen: bool = False) -> float:
        """Forward and backward (twice the forward), nothing recomputed.

        Frozen weights have no gradient of their own, only that of their input: 4 FLOPs per token instead of
        6. Attention has no weights, its backward pass stays what it is.
        """
        matrices = (2 if frozen else 3) * self.matrix_flops_per_token()
        return matrices + 3 * self.attention_flops_per_token(seq_len)


def load_model(name_or_path: str) -> Model:
    """A model of config/models by name or alias, or of a YAML file."""
    path = packaged(Path(name_or_path), "models", MODEL_DIR)
    if path.suffix in (".yaml", ".yml"):
        if not path.exists():
            there = ", ".join(sorted(other.name for other in path.parent.glob("*.yaml")))
            raise ConfigError(f"{path}: no such model file{f', there is {there}' if there else ''}")
        return convert(read_yaml(path), Model, str(path))
    wanted = name_or_path.lower()
    direct = MODEL_DIR / f"{wanted}.yaml"
    if direct.exists():
        return convert(read_yaml(direct), Model, str(direct))
    known = models()
    plain = _plain(wanted)
    for model in known.values():
        if plain in map(_plain, (model.name, *model.aliases)):
            return model
    names = [*known, *(alias for model in known.values() for alias in model.aliases)]
    raise ConfigError(f"--model {name_or_path} is not known{near(wanted, names)}")


def _plain(name: str) -> str:
    """Without the owner and what different sources write differently: Llama-3.1-8B is llama3.1-8b."""
    return name.lower().rpartition("/")[2].replace("-", "").replace("_", "").replace(" ", "")


def models() -> dict[str, Model]:
    """Every model of config/models by name."""
    found = (convert(read_yaml(path), Model, str(path)) for path in sorted(MODEL_DIR.glob("*.yaml")))
    return {model.name: model for model in found}
