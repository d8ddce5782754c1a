"""What configs of Gemma and Gemma 2 say, and which of them are refused."""

import pytest
from config_reading import attention_of, read_changed

from inferjax.config import MLP
from inferjax.errors import UnsupportedConfig

TANH = "gelu_pytorch_tanh"


def activation(config):
    mlp = config.layers[0].ffn
    assert isinstance(mlp, MLP)
    return mlp.activation


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": TANH}, "gelu_tanh"),
        ({"hidden_act": "silu"}, "silu"),
    ],
)
def test_the_first_gemmas_say_gelu_and_mean_its_approximation(keys, expected):
    config = read_changed("gemma", drop=("hidden_act", "hidden_activation"), **keys)
    assert activation(config) == expected


def test_gemma2_goes_by_its_newer_key():
    assert activation(read_changed("gemma2", hidden_activation="gelu")) == "gelu"
    released = read_changed("gemma2", hidden_act=TANH, sliding_window_size=8)
    assert activation(released) == "gelu_tanh"


def test_absent_heads_are_those_of_hugging_face():
    absent = ("head_dim", "num_key_value_heads")
    heads = attention_of(read_changed("gemma", drop=absent, num_attention_heads=16))
    assert (heads.num_kv_heads, heads.head_dim, heads.scale) == (16, 256, 1 / 16)
    for name in ("gemma2", "gemma3_text"):
        heads = attention_of(read_changed(name, drop=(*absent, "query_pre_attn_scalar")))
        assert (heads.num_kv_heads, heads.head_dim, heads.scale) == (4, 256, 1 / 16)


def test_gemma_scales_embeddings_and_stores_norms_minus_one():
    for name in ("gemma", "gemma2"):
        config = read_changed(name, drop=("tie_word_embeddings",))
        assert (config.embed_scale, config.tied) == (8.0, True)
        assert config.final_norm is not None
        assert config.final_norm.unit_offset
        assert config.layers[0].norm == config.final_norm
    assert [s.norm_out for s in read_changed("gemma").layers] == [False] * 3
    assert [s.norm_out for s in read_changed("gemma2").layers] == [True] * 4


def test_gemma2_slides_in_every_other_layer_unless_told():
    windows = [s.attention.window for s in read_changed("gemma2").layers]
    assert windows == [8, None, 8, None]
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    windows = [s.attention.window for s in read_changed("gemma2", layer_types=kinds).layers]
    assert windows == [None, None, 8, None]
    absent = read_changed("gemma2", drop=("sliding_window",))
    assert attention_of(absent).window == 4096


def test_gemma2_caps_are_absent_only_when_null():
    keys = ("attn_logit_softcapping", "final_logit_softcapping")
    config = read_changed("gemma2", drop=keys)
    assert (attention_of(config).softcap, config.final_softcap) == (50.0, 30.0)
    config = read_changed("gemma2", **dict.fromkeys(keys))
    assert (attention_of(config).softcap, config.final_softcap) == (None, None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma", {"hidden_activation": "silu"}),
        ("gemma", {"hidden_act": "silu", "hidden_activation": TANH}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("gemma", {"num_key_value_heads": 3}),
        ("gemma2", {"hidden_act": "relu"}),
        ("gemma2", {"sliding_window_size": 9}),
        ("gemma2", {"sliding_window": 0}),
        ("gemma2", {"attn_logit_softcapping": 0}),
        ("gemma2", {"final_logit_softcapping": -30.0}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma2", {"layer_types": ["full_attention"]}),
    ],
)
def test_contradictions_and_absurd_values_are_refused(name, change):
    with pytest.raises(UnsupportedConfig, match=list(change)[-1]):
        read_changed(name, **change)
