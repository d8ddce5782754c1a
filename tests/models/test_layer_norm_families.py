"""What Cohere, StableLM, StarCoder2 and OPT configs say, and which of them are refused."""

import contextlib
import json

import pytest

from inferjax.config import MLP, Attention, ModelConfig
from inferjax.errors import InferjaxError, UnsupportedConfig
from inferjax.models.family import read_config
from inferjax.models.registry import family_for

NAMES = ("cohere", "stablelm", "starcoder2", "opt")


def read(tiny, name: str, drop: tuple[str, ...] = (), **change: object) -> ModelConfig:
    raw = json.loads((tiny / name / "config.json").read_text()) | change
    return read_config(family_for(name), {key: raw[key] for key in raw if key not in drop})


def attention_of(config: ModelConfig) -> Attention:
    attention = config.layers[0].attention
    assert isinstance(attention, Attention)
    return attention


def test_cohere_runs_both_blocks_on_one_norm(tiny):
    config = read(tiny, "cohere", drop=("rope_theta", "logit_scale", "tie_word_embeddings"))
    layer, attention = config.layers[0], attention_of(config)
    assert (layer.residual, layer.norm.kind, layer.norm.bias) == ("parallel_shared", "layer", False)
    assert attention.rope is not None
    assert (attention.rope.theta, attention.rope.interleaved) == (500_000.0, True)
    assert (config.logit_scale, config.tied, attention.qk_norm) == (0.0625, True, None)
    normed = attention_of(read(tiny, "cohere", use_qk_norm=True))
    assert (normed.qk_norm, normed.qk_norm_span) == (layer.norm, "each_head")


def test_cohere_accepts_the_keys_of_the_released_config(tiny):
    config = read(tiny, "cohere", model_max_length=131_072, pretraining_tp=1)
    assert config.max_context == 256


@pytest.mark.parametrize(
    ("keys", "width"),
    [({}, 4), ({"partial_rotary_factor": 1.0}, 16), ({"partial_rotary_factor": 0.5}, 8)],
)
def test_stablelm_rotates_a_quarter_of_a_head_unless_told(tiny, keys, width):
    config = read(tiny, "stablelm", drop=() if keys else ("partial_rotary_factor",), **keys)
    rope = attention_of(config).rope
    assert rope is not None
    assert rope.dim == width


def test_stablelm_norms_have_biases_except_those_of_heads(tiny):
    config = read(tiny, "stablelm", qk_layernorm=True, layer_norm_eps=0.25)
    norm = attention_of(config).qk_norm
    assert norm is not None
    assert (norm.bias, norm.eps, config.layers[0].norm.bias) == (False, 0.25, True)
    assert config.layers[0].residual == "serial"


def test_starcoder2_has_its_window_in_every_layer(tiny):
    config = read(tiny, "starcoder2", sliding_window=9, num_hidden_layers=3)
    assert [spec.group for spec in config.layers] == [0, 0, 0]
    assert attention_of(config).window == 9
    assert attention_of(read(tiny, "starcoder2", drop=("sliding_window",))).window is None


def test_starcoder2_defaults_are_those_of_hugging_face(tiny):
    gone = ("hidden_act", "norm_epsilon", "use_bias", "tie_word_embeddings", "num_key_value_heads")
    config = read(tiny, "starcoder2", drop=gone)
    ffn, attention = config.layers[0].ffn, attention_of(config)
    assert isinstance(ffn, MLP)
    assert (ffn.activation, ffn.bias, ffn.gated) == ("gelu_tanh", True, False)
    assert (attention.num_kv_heads, attention.out_bias, config.tied) == (2, True, True)


def test_starcoder2_accepts_what_the_released_configs_say_twice(tiny):
    twice = {
        "norm_type": "layer_norm",
        "mlp_type": "default",
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
        "attention_softmax_in_fp32": True,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    }
    assert read(tiny, "starcoder2", **twice) == read(tiny, "starcoder2")


def test_opt_norms_before_or_after_its_blocks(tiny):
    before, after = read(tiny, "opt"), read(tiny, "opt", do_layer_norm_before=False)
    assert (before.layers[0].norm_in, before.layers[0].norm_sum) == (True, False)
    assert (after.layers[0].norm_in, after.layers[0].norm_sum) == (False, True)
    assert before.final_norm is not None
    assert after.final_norm is None
    assert read(tiny, "opt", _remove_final_layer_norm=True).final_norm is None


def test_opt_may_have_a_narrow_embedding_and_norms_without_weights(tiny):
    config = read(tiny, "opt", word_embed_proj_dim=16, layer_norm_elementwise_affine=False)
    assert (config.embed_dim, config.learned_positions, config.max_context) == (16, 256, 256)
    assert (config.layers[0].norm.weight, config.layers[0].norm.bias) == (False, False)
    assert read(tiny, "opt", drop=("word_embed_proj_dim",)).embed_dim is None


REFUSED = [
    ("cohere", {"logit_scale": None}),
    ("cohere", {"logit_scale": 0.0}),
    ("cohere", {"partial_rotary_factor": 0.5}),
    ("cohere", {"hidden_size": 66}),
    ("cohere", {"pretraining_tp": 2}),
    ("cohere", {"use_qk_norm": "no"}),
    ("cohere", {"sliding_window": 4}),
    ("stablelm", {"head_dim": 32}),
    ("stablelm", {"partial_rotary_factor": 0.0}),
    ("stablelm", {"partial_rotary_factor": 0.2}),
    ("stablelm", {"partial_rotary_factor": 1.5}),
    ("stablelm", {"use_parallel_residual": 1}),
    ("stablelm", {"num_key_value_heads": 3}),
    ("starcoder2", {"sliding_window": 0}),
    ("starcoder2", {"sliding_window": 4.5}),
    ("starcoder2", {"norm_type": "rms_norm"}),
    ("starcoder2", {"mlp_type": "gated"}),
    ("starcoder2", {"layer_norm_epsilon": 1e-6}),
    ("starcoder2", {"activation_function": "relu"}),
    ("starcoder2", {"activation_function": ["relu"], "hidden_act": {}}),
    ("opt", {"ffn_dim": None}),
    ("opt", {"ffn_dim": 0}),
    ("opt", {"num_attention_heads": 3}),
    ("opt", {"activation_function": "tanh"}),
    ("opt", {"learned_embeddings": False}),
    ("opt", {"scale_embeddings": True}),
    ("opt", {"max_position_embeddings": True}),
    ("opt", {"word_embed_proj_dim": -1}),
]


@pytest.mark.parametrize(("name", "change"), REFUSED)
def test_what_would_change_the_result_is_refused(tiny, name, change):
    with pytest.raises(UnsupportedConfig, match=r"config\.json"):
        read(tiny, name, **change)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, 0, -1, "", "x", [], {}, True, 2.5, 10**30])
def test_any_wrong_value_is_a_typed_error(tiny, name, value):
    raw = json.loads((tiny / name / "config.json").read_text())
    for key in raw:
        with contextlib.suppress(InferjaxError):
            read(tiny, name, **{key: value})
