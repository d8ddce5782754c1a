"""What configs of Granite say, and which of them are refused."""

import pytest
from config_reading import attention_of, read_changed

from inferjax.config import MLP
from inferjax.errors import UnsupportedConfig

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "logits_scaling",
    "residual_multiplier",
)


def test_every_multiplier_has_its_place():
    values = dict(zip(MULTIPLIERS, (0.5, 3.0, 4.0, 0.25), strict=True))
    config = read_changed("granite", **values)
    assert attention_of(config).scale == 0.5
    assert (config.embed_scale, config.logit_scale) == (3.0, 0.25)
    assert {spec.residual_scale for spec in config.layers} == {0.25}


def test_absent_multipliers_are_one_even_that_of_attention():
    config = read_changed("granite", drop=MULTIPLIERS)
    assert attention_of(config).scale == 1.0
    assert (config.embed_scale, config.logit_scale) == (1.0, 1.0)
    assert config.layers[0].residual_scale == 1.0


def test_biases_are_of_attention_and_of_the_feed_forward_block():
    layer = read_changed("granite", attention_bias=True).layers[0]
    assert isinstance(layer.ffn, MLP)
    assert (layer.attention.qkv_bias, layer.attention.out_bias, layer.ffn.bias) == (
        *(True, True),
        False,
    )
    layer = read_changed("granite", mlp_bias=True).layers[0]
    assert isinstance(layer.ffn, MLP)
    assert (layer.attention.qkv_bias, layer.ffn.bias) == (False, True)


@pytest.mark.parametrize("key", MULTIPLIERS)
@pytest.mark.parametrize("value", ["1", -0.5, float("nan"), float("inf"), True, [1.0]])
def test_a_multiplier_is_a_number(key, value):
    with pytest.raises(UnsupportedConfig, match=key):
        read_changed("granite", **{key: value})


def test_logits_are_not_divided_by_zero():
    with pytest.raises(UnsupportedConfig, match="logits_scaling"):
        read_changed("granite", logits_scaling=0)
