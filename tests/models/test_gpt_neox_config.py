"""What configs of GPT-NeoX and Pythia say, and which tensors and configs are set aside."""

import pytest
from config_reading import attention_of, read_changed, rope_of

from inferjax.config import MLP
from inferjax.errors import UnsupportedConfig
from inferjax.models.family import skips_tensor
from inferjax.models.registry import family_for

OLD = ("rotary_pct", "rotary_emb_base")


def test_blocks_are_parallel_unless_told():
    layer = read_changed("gpt_neox", drop=("use_parallel_residual",)).layers[0]
    assert (layer.residual, layer.norm.kind, layer.norm.bias) == ("parallel", "layer", True)
    assert read_changed("gpt_neox", use_parallel_residual=False).layers[0].residual == "serial"


@pytest.mark.parametrize(
    ("keys", "theta", "rotated"),
    [
        ({}, 10_000.0, 4),
        ({"rotary_pct": 1.0, "rotary_emb_base": 500.0}, 500.0, 16),
        # What some versions of transformers 4 write, one beside the other.
        (
            {"rotary_pct": 0.5, "partial_rotary_factor": 0.5}
            | {"rotary_emb_base": 500, "rope_theta": 500.0, "rope_scaling": None},
            500.0,
            8,
        ),
        ({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}, 500.0, 8),
        ({"rope_parameters": {"rope_type": "default"}}, 10_000.0, 4),
    ],
)
def test_rope_by_its_old_and_its_new_names(keys, theta, rotated):
    rope = rope_of(read_changed("gpt_neox", drop=OLD, **keys))
    assert (rope.theta, rope.dim, rope.interleaved) == (theta, rotated, False)


@pytest.mark.parametrize(
    ("name", "activation"),
    [("gelu", "gelu"), ("gelu_fast", "gelu_tanh"), ("gelu_new", "gelu_tanh"), ("relu", "relu")],
)
def test_activations_of_released_models(name, activation):
    mlp = read_changed("gpt_neox", hidden_act=name).layers[0].ffn
    assert isinstance(mlp, MLP)
    assert (mlp.activation, mlp.gated, mlp.bias) == (activation, False, True)


def test_biases_of_attention_may_be_absent():
    assert attention_of(read_changed("gpt_neox", drop=("attention_bias",))).out_bias
    attention = attention_of(read_changed("gpt_neox", attention_bias=False))
    assert (attention.qkv_bias, attention.out_bias) == (False, False)


def test_keys_of_the_first_release_are_understood():
    change = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}
    assert read_changed("gpt_neox", **change) == read_changed("gpt_neox")


def test_stored_masks_are_skipped():
    family, config = family_for("gpt_neox"), read_changed("gpt_neox")
    layer = "gpt_neox.layers.1.attention"
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        assert skips_tensor(family, f"{layer}.{name}", config)
    assert not skips_tensor(family, f"{layer}.dense.bias", config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rotary_pct": 0.0}, "partial_rotary_factor"),
        ({"rotary_pct": 1.5}, "rotary_pct"),
        ({"rotary_emb_base": 0}, "rotary_emb_base"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"head_dim": 32}, "head_dim"),
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
    ],
)
def test_contradictions_and_absurd_values_are_refused(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed("gpt_neox", **change)
