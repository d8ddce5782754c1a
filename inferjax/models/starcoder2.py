"""StarCoder2: LayerNorm, biases, a feed-forward block without a gate, a window in every layer."""

import functools

from inferjax.config import LayerSpec, ModelConfig
from inferjax.models.family import Family
from inferjax.models.gpt_gguf import STARCODER2_GGUF
from inferjax.models.hf import ConfigReader
from inferjax.models.settings import (
    read_attention,
    read_mlp,
    read_model,
    read_norm,
    read_num_layers,
    read_window,
)
from inferjax.models.sources import decoder, decoder_layer, plain_mlp
from inferjax.params import Params


def _config(reader: ConfigReader) -> ModelConfig:
    biased = reader.flag("use_bias", True)
    norm = read_norm(reader, "norm_epsilon", 1e-5, kind="layer", bias=True)
    layer = LayerSpec(
        attention=read_attention(
            reader, kv_heads=2, window=read_window(reader), qkv_bias=biased, out_bias=biased
        ),
        ffn=read_mlp(reader, default="gelu_pytorch_tanh", gated=False, bias=biased),
        norm=norm,
    )
    _expect_one_architecture(reader, norm.eps)
    return read_model(
        reader,
        "starcoder2",
        [layer] * read_num_layers(reader),
        norm,
        tied=True,
        bos=50_256,
        eos=50_256,
    )


def _expect_one_architecture(reader: ConfigReader, eps: float) -> None:
    """Check what the released configs say twice, or of variants that were never released."""
    reader.expect("norm_type", "layer_norm")
    reader.expect("mlp_type", "default")
    reader.expect("scale_attn_weights", True)
    reader.expect("layer_norm_epsilon", eps)
    reader.expect("activation_function", reader.value("hidden_act") or "gelu_pytorch_tanh")


def _weights(config: ModelConfig) -> Params:
    ffn = functools.partial(plain_mlp, up="c_fc", down="c_proj")
    return decoder(config, functools.partial(decoder_layer, ffn=ffn))


FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM",),
    config=_config,
    weights=_weights,
    # Dropout; and where training computes in float32, as attention scores are here in any case.
    ignored_keys=frozenset(
        {
            "embedding_dropout",
            "residual_dropout",
            "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        }
    ),
    gguf=STARCODER2_GGUF,
)
