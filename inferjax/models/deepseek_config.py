"""What the configs of DeepSeek-V2 and V3 have in common: latent attention, grouped experts."""

import dataclasses

from inferjax.config import MLP, LatentAttention, MoE, Norm, Router
from inferjax.layers.rope import yarn_mscale
from inferjax.models.hf import MAX_EXPERTS, REQUIRED, ConfigReader, read_context
from inferjax.models.rope_config import read_rope
from inferjax.models.settings import read_synonyms

# Training losses, and how many devices the original runs spread their experts over.
TRAINING_KEYS = frozenset(
    {"aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef", "ep_size"}
)


def read_latent_attention(reader: ConfigReader, *, interleaved: bool) -> LatentAttention:
    """Return the attention that all layers share."""
    heads = reader.integer("num_attention_heads", high=65_536)
    reader.expect("num_key_value_heads", heads)
    nope, rope_dim = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    reader.expect("qk_head_dim", nope + rope_dim)
    reader.expect("head_dim", rope_dim)
    rope = read_rope(reader, dim=rope_dim, declared=read_context(reader), interleaved=interleaved)
    mscale = yarn_mscale(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    unfactored = reader.given("q_lora_rank", 0) is None
    return LatentAttention(
        num_q_heads=heads,
        q_rank=None if unfactored else reader.integer("q_lora_rank"),
        kv_rank=reader.integer("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=reader.integer("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5 * mscale * mscale,
        rope=rope,
        # The reference gives these two norms the default epsilon, whatever rms_norm_eps says.
        norm=Norm(eps=1e-6),
        bias=reader.flag("attention_bias", False),
    )


def read_expert_count(reader: ConfigReader) -> int:
    """Return E, under any of the names it goes by."""
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    return read_synonyms(reader, keys, high=MAX_EXPERTS)


def read_groups(
    reader: ConfigReader, num_experts: int, *, groups: int | None, kept: int | None
) -> tuple[int, int]:
    """Return how many groups experts form and a token keeps; the numbers stand in for keys."""
    num_groups = reader.integer("n_group", groups or REQUIRED, high=num_experts)
    if num_experts % num_groups:
        reader.refuse("n_group", num_groups, f"{num_experts} experts must form equal groups")
    return num_groups, reader.integer("topk_group", kept or REQUIRED, high=num_groups)


def read_routed_and_shared(reader: ConfigReader, dense: MLP, router: Router, *, shared: int) -> MoE:
    """Return routed experts beside shared ones, which are one block as wide as all of them."""
    ffn = reader.integer("moe_intermediate_size")
    num_shared = reader.integer("n_shared_experts", shared, high=MAX_EXPERTS)
    return MoE(
        router=router,
        ffn_dim=ffn,
        activation=dense.activation,
        shared=dataclasses.replace(dense, ffn_dim=ffn * num_shared),
    )
