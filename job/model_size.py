"""How large a model is, counted from its configuration alone; estimates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from job import experts

FOUR_BITS_BYTES = 0.516  # of a parameter, with its share of the scales
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Linear:
    """Matrices of one name: their shape, how many the model has, and how many a token passes through."""

    name: str
    rows: int
    columns: int
    count: int
    active: int
    is_expert: bool = False

    @property
    def params(self) -> int:
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class ModelSize:
    """Parameters of a decoder, without norms and biases; of a multimodal one, its text part."""

    hidden: int
    layers: int
    vocab: int
    embeddings: int  # 2 unless input and output share one
    linears: tuple[Linear, ...]

    @property
    def embedding_params(self) -> int:
        return self.embeddings * self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.embedding_params + sum(one.params for one in self.linears)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with."""
        passed = sum(one.rows * one.columns * one.active for one in self.linears)
        return self.vocab * self.hidden + passed

    def lora(self, rank: int, targets: str | tuple[str, ...]) -> int:
        """Parameters of an adapter: rank * (rows + columns) for every matrix that gets one."""
        wanted = [
            one
            for one in self.linears
            if (targets == "all-linear" and not one.is_expert) or one.name in _last_names(targets)
        ]
        return sum(rank * (one.rows + one.columns) * one.count for one in wanted)

    def weights_bytes(self, dtype_bytes: int, *, four_bit: bool) -> float:
        """dtype bytes per parameter; in the 4-bit tier those of NF4 for layers and experts."""
        small = sum(one.params for one in self.linears) if four_bit else 0
        return (self.params - small) * dtype_bytes + small * FOUR_BITS_BYTES


def _last_names(targets: str | tuple[str, ...]) -> set[str]:
    return {one.rpartition(".")[2] for one in targets} if not isinstance(targets, str) else set()


def model_size(facts: Mapping[str, Any]) -> ModelSize | None:
    """The size of a decoder with this text configuration; None when it does not say enough."""
    if any(not facts.get(name) for name in NEEDED):
        return None
    return ModelSize(
        hidden=facts["hidden_size"],
        layers=facts["num_hidden_layers"],
        vocab=facts["vocab_size"],
        embeddings=1 if facts.get("tie_word_embeddings") else 2,
        linears=(*_attention(facts), *_delta_net(facts), *_feed_forward(facts)),
    )


def _delta_net_layers(facts: Mapping[str, Any]) -> int:
    return list(facts.get("layer_types") or ()).count("linear_attention")


def _attention(facts: Mapping[str, Any]) -> list[Linear]:
    hidden, heads = facts["hidden_size"], facts["num_attention_heads"]
    size = facts.get("head_dim") or hidden // heads
    keys, count = (facts.get("num_key_value_heads") or heads) * size, facts["num_hidden_layers"]
    linear = _delta_net_layers(facts)
    gated = 2 if linear else 1  # models with Gated DeltaNet also gate what attention puts out
    count -= linear
    shapes = {
        "q_proj": (hidden, heads * size * gated),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (heads * size, hidden),
    }
    return [Linear(name, *shape, count, count) for name, shape in shapes.items()]


def _delta_net(facts: Mapping[str, Any]) -> list[Linear]:
    count, hidden = _delta_net_layers(facts), facts["hidden_size"]
    if not count or not facts.get("linear_num_value_heads"):
        return []
    values = facts["linear_num_value_heads"] * facts["linear_value_head_dim"]
    keys = facts["linear_num_key_heads"] * facts["linear_key_head_dim"]
    shapes = {
        "in_proj_qkv": (hidden, 2 * keys + values),
        "in_proj_z": (hidden, values),
        "in_proj_b": (hidden, facts["linear_num_value_heads"]),
        "in_proj_a": (hidden, facts["linear_num_value_heads"]),
        "out_proj": (values, hidden),
    }
    return [Linear(name, *shape, count, count) for name, shape in shapes.items()]


def _feed_forward(facts: Mapping[str, Any]) -> list[Linear]:
    hidden, layers = facts["hidden_size"], facts["num_hidden_layers"]
    count = experts.count(facts)
    if not count:
        return _gated("", hidden, facts.get("intermediate_size") or 4 * hidden, layers, layers)
    width = facts.get("moe_intermediate_size") or facts["intermediate_size"]
    active = layers * (facts.get("num_experts_per_tok") or 1)
    found = _gated("", hidden, width, layers * count, active, is_expert=True)
    shared = facts.get("shared_expert_intermediate_size")
    return [
        *found,
        *(_gated("shared_", hidden, shared, layers, layers) if shared else []),
        Linear("gate", hidden, count, layers, layers, is_expert=True),
    ]


def _gated(
    kind: str, hidden: int, width: int, count: int, active: int, *, is_expert: bool = False
) -> list[Linear]:
    shapes = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    return [Linear(kind + name, *shape, count, active, is_expert) for name, shape in shapes.items()]
