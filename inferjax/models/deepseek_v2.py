"""DeepSeek-V2: latent attention; dense layers, then experts by a softmax beside shared ones."""

from inferjax.config import MLP, LayerSpec, ModelConfig, MoE, Router
from inferjax.models.deepseek_config import (
    TRAINING_KEYS,
    read_expert_count,
    read_groups,
    read_latent_attention,
    read_routed_and_shared,
)
from inferjax.models.deepseek_gguf import DEEPSEEK_V2_GGUF
from inferjax.models.deepseek_weights import weights
from inferjax.models.family import Family
from inferjax.models.hf import MAX_EXPERTS, MAX_LAYERS, ConfigReader
from inferjax.models.settings import read_mlp, read_model, read_norm, read_num_layers


def _config(reader: ConfigReader) -> ModelConfig:
    num_dense = reader.integer("first_k_dense_replace", 0, low=0, high=MAX_LAYERS)
    step = reader.integer("moe_layer_freq", 1, high=MAX_LAYERS)
    norm, dense = read_norm(reader), read_mlp(reader, bias=reader.flag("mlp_bias", False))
    reader.expect("rope_interleave", True)
    attention = read_latent_attention(reader, interleaved=True)
    moe = _read_experts(reader, dense)
    # Slicing for tensor-parallel pre-training: another order of summation than the one run here.
    reader.expect("pretraining_tp", 1)

    def layer(i: int) -> LayerSpec:
        sparse = i >= num_dense and i % step == 0
        return LayerSpec(attention=attention, ffn=moe if sparse else dense, norm=norm)

    layers = [layer(i) for i in range(read_num_layers(reader))]
    return read_model(reader, "deepseek_v2", layers, norm, bos=1, eos=2)


def _read_experts(reader: ConfigReader, dense: MLP) -> MoE:
    count = read_expert_count(reader)
    reader.expect("scoring_func", "softmax")
    # DeepSeek's own code would normalise the weights instead of scaling them; Hugging Face's
    # scales and never normalises. Every release says false, where both agree.
    reader.expect("norm_topk_prob", False)
    groups, kept = _read_choice(reader, count)
    router = Router(
        kind="softmax",
        num_experts=count,
        experts_per_token=reader.integer("num_experts_per_tok", high=kept * (count // groups)),
        num_groups=groups,
        groups_per_token=kept,
        group_score="best",
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    return read_routed_and_shared(reader, dense, router, shared=2)


def _read_choice(reader: ConfigReader, count: int) -> tuple[int, int]:
    """Return groups and groups per token; a greedy choice has one, whatever the keys say."""
    if reader.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy"):
        return read_groups(reader, count, groups=None, kept=None)
    for key in ("n_group", "topk_group"):
        reader.integer(key, None, low=0, high=MAX_EXPERTS)
    return 1, 1


FAMILY = Family(
    name="deepseek_v2",
    model_types=("deepseek_v2",),
    architectures=("DeepseekV2ForCausalLM",),
    config=_config,
    weights=weights,
    ignored_keys=TRAINING_KEYS,
    gguf=DEEPSEEK_V2_GGUF,
)
