"""OLMo 3: OLMo 2 where three of four layers are local, with a rope of their own."""

import dataclasses
from collections.abc import Mapping

from inferjax.config import Attention, ModelConfig, Rope
from inferjax.models.family import Family
from inferjax.models.hf import ConfigReader, read_context, read_heads, read_layer_types
from inferjax.models.olmo2 import read_olmo_layer, weights
from inferjax.models.olmo_gguf import OLMO3_GGUF
from inferjax.models.rope_config import LAYER_KINDS, read_layer_ropes
from inferjax.models.settings import read_model, read_num_layers, read_window

_THETA = 500_000.0


def _config(reader: ConfigReader) -> ModelConfig:
    heads, kv_heads, head_dim = read_heads(reader, reader.integer("hidden_size"))
    rope, local_rope = _ropes(reader, head_dim)
    attention = Attention(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
    )
    local = dataclasses.replace(attention, rope=local_rope, window=read_window(reader, 4096))
    full, sliding = (read_olmo_layer(reader, kind) for kind in (attention, local))
    kinds = read_layer_types(reader, read_num_layers(reader), 4)
    layers = [sliding if slides else full for slides in kinds]
    return read_model(reader, "olmo3", layers, full.norm, eos=50_279)


def _ropes(reader: ConfigReader, dim: int) -> tuple[Rope, Rope]:
    """Return the ropes of global and of local layers; the hub's `rope_scaling` is for the former.

    Two styles are refused: the reference's versions disagree whether local layers follow another
    `rope_theta`, and it passes over settings in `rope_parameters` that are of no kind of layer.
    """
    reader.expect("rope_theta", _THETA)
    new = reader.value("rope_parameters")
    if new and isinstance(new, Mapping) and not any(kind in new for kind in LAYER_KINDS):
        reader.refuse("rope_parameters", new, f"it must be one object per {LAYER_KINDS}")
    return read_layer_ropes(
        reader, dim=dim, declared=read_context(reader), theta=_THETA, local_theta=_THETA
    )


FAMILY = Family(
    name="olmo3",
    model_types=("olmo3",),
    architectures=("Olmo3ForCausalLM",),
    config=_config,
    weights=weights,
    gguf=OLMO3_GGUF,
)
