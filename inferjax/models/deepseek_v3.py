"""DeepSeek-V3: latent attention; some dense layers, then grouped experts beside a shared one."""

from inferjax.config import MLP, LayerSpec, ModelConfig, MoE, Router
from inferjax.models.deepseek_config import (
    TRAINING_KEYS,
    read_expert_count,
    read_groups,
    read_latent_attention,
    read_routed_and_shared,
)
from inferjax.models.deepseek_gguf import DEEPSEEK_V3_GGUF
from inferjax.models.deepseek_weights import weights
from inferjax.models.family import Family
from inferjax.models.hf import MAX_LAYERS, ConfigReader
from inferjax.models.settings import read_mlp, read_model, read_norm, read_num_layers


def _config(reader: ConfigReader) -> ModelConfig:
    num_dense = reader.integer("first_k_dense_replace", 3, low=0, high=MAX_LAYERS)
    norm, dense = read_norm(reader), read_mlp(reader)
    attention = read_latent_attention(reader, interleaved=reader.flag("rope_interleave", True))
    moe = _read_experts(reader, dense)
    reader.expect("pretraining_tp", 1)
    # Extra layers that predict further tokens; they take no part in the next one's logits.
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        reader.integer(key, 0, low=0, high=MAX_LAYERS)
    layers = [
        LayerSpec(attention=attention, ffn=dense if i < num_dense else moe, norm=norm)
        for i in range(read_num_layers(reader))
    ]
    return read_model(reader, "deepseek_v3", layers, norm, bos=0, eos=1)


def _read_experts(reader: ConfigReader, dense: MLP) -> MoE:
    count = read_expert_count(reader)
    groups, kept = read_groups(reader, count, groups=8, kept=4)
    if groups > 1 and count < 2 * groups:
        reader.refuse("n_group", groups, "groups are ranked by their best two experts")
    reader.expect("scoring_func", "sigmoid")
    reader.expect("topk_method", "noaux_tc")
    reader.expect("moe_layer_freq", 1)
    router = Router(
        kind="sigmoid",
        num_experts=count,
        experts_per_token=reader.integer("num_experts_per_tok", 8, high=kept * (count // groups)),
        num_groups=groups,
        groups_per_token=kept,
        normalize=reader.flag("norm_topk_prob", True),
        scale=reader.number("routed_scaling_factor", 2.5),
        score_bias=True,
    )
    return read_routed_and_shared(reader, dense, router, shared=1)


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
    ignored_keys=TRAINING_KEYS,
    skips=_skips,
    gguf=DEEPSEEK_V3_GGUF,
)
