"""DeepSeek-V3: latent attention; some dense layers, then grouped experts beside a shared one."""

import numpy as np
from einops import rearrange
from jaxtyping import Shaped

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
from inferjax.models.sources import (
    Tensor,
    decoder,
    gated_mlp,
    linear,
    norm,
    plain,
    reshaped,
    source,
)
from inferjax.params import LatentParams, LayerParams, MoEParams, Params


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
    reader.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
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


def _weights(config: ModelConfig) -> Params:
    return decoder(config, _layer)


def _layer(name: str, spec: LayerSpec, dim: int) -> LayerParams:
    assert isinstance(spec.attention, LatentAttention)
    ffn = spec.ffn
    return LayerParams(
        attention=_latent(f"{name}.self_attn", spec.attention, dim),
        ffn=gated_mlp(f"{name}.mlp", ffn, dim)
        if isinstance(ffn, MLP)
        else _experts(f"{name}.mlp", ffn, dim),
        attention_in=norm(f"{name}.input_layernorm", dim, spec.norm),
        ffn_in=norm(f"{name}.post_attention_layernorm", dim, spec.norm),
    )


def _latent(name: str, spec: LatentAttention, dim: int) -> LatentParams:
    """Reorder the rotary rows, and split kv_b into what expands keys and what expands values."""
    heads, rank = spec.num_q_heads, spec.kv_rank
    nope, value, q_in = spec.nope_dim, spec.value_dim, spec.q_rank or dim
    down, q_down = f"{name}.kv_a_proj_with_mqa", f"{name}.q_a_proj"
    q_up = f"{name}.q_proj.weight" if spec.q_rank is None else f"{name}.q_b_proj.weight"
    up = (Tensor(f"{name}.kv_b_proj.weight", (heads * (nope + value), rank)),)
    biased, factored = spec.bias, spec.q_rank is not None

    def build_wq(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "R N H"]:
        return rearrange(_halves(rearrange(w, "(n h) r -> h n r", n=heads), spec), "h n r -> r n h")

    def build_wk(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "N H R"]:
        return rearrange(w, "(n h) r -> n h r", n=heads)[:, :nope]

    def build_wv(w: Shaped[np.ndarray, "out R"]) -> Shaped[np.ndarray, "N R H"]:
        return rearrange(w, "(n h) r -> n r h", n=heads)[:, :, nope:]

    down_shape = (rank + spec.rope_dim, dim)
    return LatentParams(
        wq_a=linear(f"{q_down}.weight", q_in, dim) if factored else None,
        bq_a=plain(f"{q_down}.bias", q_in) if factored and biased else None,
        q_norm=norm(f"{name}.q_a_layernorm", q_in, spec.norm) if factored else None,
        wq=source((Tensor(q_up, (heads * (nope + spec.rope_dim), q_in)),), build_wq),
        wkv_a=source((Tensor(f"{down}.weight", down_shape),), lambda w: _halves(w, spec).T),
        bkv_a=source((Tensor(f"{down}.bias", down_shape[:1]),), lambda b: _halves(b, spec))
        if biased
        else None,
        kv_norm=norm(f"{name}.kv_a_layernorm", rank, spec.norm),
        wk_b=source(up, build_wk),
        wv_b=source(up, build_wv),
        wo=reshaped(f"{name}.o_proj.weight", (dim, heads * value), "d (n h) -> n h d", n=heads),
        bo=plain(f"{name}.o_proj.bias", dim) if biased else None,
    )


def _halves(
    rows: Shaped[np.ndarray, "rows *rest"], spec: LatentAttention
) -> Shaped[np.ndarray, "rows *rest"]:
    """Move the last `rope_dim` rows from neighbouring pairs into two halves."""
    if not spec.rope.interleaved:
        return rows
    kept, rotary = rows[: -spec.rope_dim], rows[-spec.rope_dim :]
    return np.concatenate([kept, rotary[0::2], rotary[1::2]])


def _experts(name: str, spec: MoE, dim: int) -> MoEParams:
    count, ffn = spec.router.num_experts, spec.ffn_dim

    def stored(part: str, *shape: int) -> tuple[Tensor, ...]:
        names = (f"{name}.experts.{i}.{part}_proj.weight" for i in range(count))
        return tuple(Tensor(tensor, shape) for tensor in names)

    assert spec.shared is not None
    return MoEParams(
        router=linear(f"{name}.gate.weight", count, dim),
        score_bias=plain(f"{name}.gate.e_score_correction_bias", count),
        w_in=source(stored("gate", ffn, dim) + stored("up", ffn, dim), _stack_gate_up),
        w_down=source(stored("down", dim, ffn), _stack_down),
        shared=gated_mlp(f"{name}.shared_experts", spec.shared, dim),
    )


def _stack_gate_up(
    *weights: Shaped[np.ndarray, "F D"],
) -> Shaped[np.ndarray, "E D 2 F"]:
    """Stack all experts' gates, then all experts' ups, as `Params` lays them out."""
    return rearrange(np.stack(weights), "(p e) f d -> e d p f", p=2)


def _stack_down(*weights: Shaped[np.ndarray, "D F"]) -> Shaped[np.ndarray, "E F D"]:
    return rearrange(np.stack(weights), "e d f -> e f d")


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
    weights=_weights,
    # Training losses, and how many devices the original run spread its experts over.
    ignored_keys=frozenset(
        {"aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef", "ep_size"}
    ),
    skips=_skips,
)
