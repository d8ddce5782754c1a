"""The rules that bend a rope's frequencies, as GGUF files state them."""

import pytest
from gguf_metadata import config, raw_config

from inferjax.errors import UnsupportedConfig

TYPE, FACTOR, OLD = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
ORIGINAL = "rope.scaling.original_context_length"
FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 8.0]
FREQS = {"rope_freqs.weight": FACTORS}
BOTH = {"rope_factors_long.weight": FACTORS, "rope_factors_short.weight": [1.0] * 8}


def rope(architecture="llama", tensors=None, **changed):
    return config(architecture, (), tensors, **changed).layers[0].attention.rope


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("none", 1.0)),
        ({TYPE: "none"}, ("none", 1.0)),
        ({TYPE: "linear", FACTOR: 4.0}, ("linear", 4.0)),
        # Without a type the factor is a linear one, as llama.cpp has it.
        ({FACTOR: 4.0}, ("linear", 4.0)),
        ({OLD: 2.0}, ("linear", 2.0)),
        ({OLD: 2.0, FACTOR: 2.0}, ("linear", 2.0)),
        ({TYPE: "linear", FACTOR: 1.0}, ("none", 1.0)),
        ({FACTOR: 0.0}, ("none", 1.0)),
        ({TYPE: "yarn", FACTOR: 4.0, ORIGINAL: 64}, ("yarn", 4.0)),
    ],
)
def test_scaling_is_read(keys, expected):
    found = rope(**keys)
    assert (found.scaling, found.factor) == expected


@pytest.mark.parametrize(
    "keys",
    [
        {TYPE: "none", FACTOR: 4.0},
        {TYPE: "ntk", FACTOR: 4.0},
        {OLD: 2.0, FACTOR: 4.0},
        {TYPE: "linear", FACTOR: 4.0, "rope.scaling.attn_factor": 1.2},
        {TYPE: "yarn", FACTOR: 4.0, "rope.scaling.attn_factor": 1.2},
        {TYPE: "yarn", FACTOR: 4.0, "rope.scaling.yarn_ext_factor": 0.5},
        {TYPE: "yarn", FACTOR: 4.0, "rope.scaling.yarn_beta_fast": "32"},
        {TYPE: "linear", FACTOR: 4.0, "rope.scaling.yarn_beta_fast": 32.0},
        {"rope.scaling.alpha": 1000.0},
        {TYPE: "longrope"},
        {FACTOR: float("nan")},
        {"rope.freq_base": 0.0},
    ],
)
def test_contradictions_and_unknown_rules_are_refused(keys):
    with pytest.raises(UnsupportedConfig, match="rope"):
        rope(**keys)


def test_yarns_numbers_are_read():
    found = rope(
        **{
            TYPE: "yarn",
            FACTOR: 4.0,
            ORIGINAL: 64,
            "rope.scaling.yarn_beta_fast": 16.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 1.25,
            "rope.scaling.yarn_ext_factor": 1.0,
            "rope.scaling.finetuned": True,
        }
    )
    assert (found.original_context, found.beta_fast, found.beta_slow) == (64, 16.0, 2.0)
    assert found.attention_factor == 1.25


def test_yarns_multiplier_is_of_all_dimensions():
    found = rope(**{TYPE: "yarn", FACTOR: 4.0, "rope.scaling.yarn_log_multiplier": 0.5})
    assert (found.mscale, found.mscale_all_dim) == (1.0, 0.5)


def test_divisors_of_the_frequencies_stand_in_a_tensor():
    found = rope(tensors=FREQS)
    assert (found.scaling, found.attention_factor) == ("longrope", 1.0)
    assert found.long_factor == found.short_factor == tuple(FACTORS)


def test_phi3_factors_stand_in_two_tensors():
    keys = {ORIGINAL: 64, "rope.scaling.attn_factor": 1.19}
    found = rope("phi3", BOTH, **keys)
    assert (found.original_context, found.attention_factor) == (64, 1.19)
    assert (found.long_factor, found.short_factor) == (tuple(FACTORS), (1.0,) * 8)
    assert raw_config("phi3", (), BOTH, **keys)["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("tensors", "keys"),
    [
        (FREQS, {TYPE: "yarn", FACTOR: 4.0}),
        (FREQS, {TYPE: "linear", FACTOR: 4.0}),
        (FREQS | BOTH, {}),
        ({"rope_factors_long.weight": FACTORS}, {}),
        ({"rope_freqs.weight": FACTORS[:7]}, {}),
        ({"rope_freqs.weight": [1.0] * 40_000}, {}),
        ({"rope_freqs.weight": [0.0, *FACTORS[1:]]}, {}),
    ],
)
def test_divisors_that_are_contradicted_are_refused(tensors, keys):
    with pytest.raises(UnsupportedConfig):
        rope(tensors=tensors, **keys)


def test_phi3_knows_no_other_rule():
    with pytest.raises(UnsupportedConfig, match="linear"):
        rope("phi3", **{TYPE: "linear", FACTOR: 4.0})


@pytest.mark.parametrize("key", ["rope.freq_base", TYPE, "rope.dimension_count"])
def test_a_model_without_a_rope_has_no_keys_for_one(key):
    with pytest.raises(UnsupportedConfig, match=key):
        config("gpt2", **{key: 1})
