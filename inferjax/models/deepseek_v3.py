"""DeepSeek-V3: latent attention; some dense layers, then grouped experts beside a shared one."""

from inferjax.config import (
    MLP,
    LatentAttention,
    LayerSpec,
    ModelConfig,
    MoE,
    Norm,
    Router,
    assign_groups,
)
from inferjax.layers.rope import yarn_mscale
from inferjax.models.deepseek_v3_weights import weights
from inferjax.models.family import Family
from inferjax.models.hf import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    read_context,
    read_dtype,
    read_token_ids,
)
from inferjax.models.rope_config import read_rope


def _config(reader: ConfigReader) -> ModelConfig:
    dim, vocab = reader.integer("hidden_size"), reader.integer("vocab_size")
    num_layers = reader.integer("num_hidden_layers", high=MAX_LAYERS)
    num_dense = reader.integer("first_k_dense_replace", 3, low=0, high=MAX_LAYERS)
    rms = Norm(eps=reader.number("rms_norm_eps", 1e-6, high=1.0))
    attention = _read_attention(reader)
    dense = MLP(
        ffn_dim=reader.integer("intermediate_size"),
        activation=reader.choice("hidden_act", ACTIVATIONS, "silu"),
    )
    moe = _read_experts(reader, dense)
    reader.expect("pretraining_tp", 1)
    # Extra layers that predict further tokens; they take no part in the next one's logits.
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        reader.integer(key, 0, low=0, high=MAX_LAYERS)
    layers = tuple(
        LayerSpec(attention=attention, ffn=dense if i < num_dense else moe, norm=rms)
        for i in range(num_layers)
    )
    return ModelConfig(
        family="deepseek_v3",
        vocab_size=vocab,
        model_dim=dim,
        max_context=attention.rope.max_context,
        layers=assign_groups(layers),
        final_norm=rms,
        tied=reader.flag("tie_word_embeddings", False),
        dtype=read_dtype(reader),
        **read_token_ids(reader, vocab, bos=0, eos=1),
    )


def _read_attention(reader: ConfigReader) -> LatentAttention:
    heads = reader.integer("num_attention_heads", high=65_536)
    reader.expect("num_key_value_heads", heads)
    nope, rope_dim = reader.integer("qk_nope_head_dim"), reader.integer("qk_rope_head_dim")
    reader.expect("qk_head_dim", nope + rope_dim)
    reader.expect("head_dim", rope_dim)
    rope = read_rope(
        reader,
        dim=rope_dim,
        declared=read_context(reader),
        interleaved=reader.flag("rope_interleave", True),
    )
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


def _read_experts(reader: ConfigReader, dense: MLP) -> MoE:
    count = reader.integer("n_routed_experts", high=MAX_EXPERTS)
    reader.expect("num_local_experts", count)
    groups = reader.integer("n_group", 8, high=count)
    if count % groups or (groups > 1 and count < 2 * groups):
        reader.refuse("n_group", groups, f"{count} experts need equal groups of two or more")
    kept = reader.integer("topk_group", 4, high=groups)
    per_token = reader.integer("num_experts_per_tok", 8, high=kept * (count // groups))
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    reader.expect("moe_layer_freq", 1)
    ffn = reader.integer("moe_intermediate_size")
    shared = reader.integer("n_shared_experts", 1, high=MAX_EXPERTS)
    return MoE(
        router=Router(
            kind="sigmoid",
            num_experts=count,
            experts_per_token=per_token,
            num_groups=groups,
            groups_per_token=kept,
            normalize=reader.flag("norm_topk_prob", True),
            scale=reader.number("routed_scaling_factor", 2.5),
            score_bias=True,
        ),
        ffn_dim=ffn,
        activation=dense.activation,
        shared=MLP(ffn_dim=ffn * shared, activation=dense.activation),
    )


def _skips(name: str, config: ModelConfig) -> bool:
    """Skip the layers beyond the model's own: they predict tokens after the next one."""
    parts = name.split(".")
    beyond = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal()
    return beyond and int(parts[2][:9]) >= config.num_layers


FAMILY = Family(
    name="deepseek_v3",
    model_types=("deepseek_v3",),
    architectures=("DeepseekV3ForCausalLM",),
    config=_config,
    weights=weights,
    # Training losses, and how many devices the original run spread its experts over.
    ignored_keys=frozenset(
        {"aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef", "ep_size"}
    ),
    skips=_skips,
)
