"""What configs of GLM-4 say, and which of them are refused."""

import pytest
from config_reading import attention_of, read_changed, rope_of

from inferjax.errors import UnsupportedConfig


def test_absent_keys_are_those_of_hugging_face():
    absent = ("attention_bias", "head_dim", "num_key_value_heads", "partial_rotary_factor")
    config = read_changed("glm4", drop=(*absent, "rms_norm_eps"))
    attention = attention_of(config)
    assert (attention.num_kv_heads, attention.head_dim) == (2, 128)
    assert (attention.qkv_bias, attention.out_bias) == (True, False)
    assert (rope_of(config).dim, rope_of(config).interleaved) == (64, True)
    assert config.layers[0].norm.eps == 1.5625e-7
    assert read_changed("glm4", drop=("eos_token_id",), vocab_size=151_552).eos_ids == (
        *(151_329, 151_336),
        151_338,
    )


def test_each_block_is_normalised_before_and_after():
    layer = read_changed("glm4").layers[0]
    assert (layer.norm_in, layer.norm_out, layer.residual) == (True, True, "serial")


def test_both_styles_give_one_config():
    new = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    outer = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    config = read_changed("glm4", drop=outer, rope_parameters=new)
    assert config == read_changed("glm4", partial_rotary_factor=0.25)
    assert rope_of(config).dim == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partial_rotary_factor": 0.2}, "head_dim"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"attention_bias": "true"}, "attention_bias"),
    ],
)
def test_contradictions_and_absurd_values_are_refused(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed("glm4", **change)
