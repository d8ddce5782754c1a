"""What configs of Phi-3 and Phi-4 say, and which of them are refused."""

import pytest
from config_reading import attention_of, read_changed, rope_of

from inferjax.errors import UnsupportedConfig

FACTORS = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8}
LONG = {"type": "longrope"} | FACTORS
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    "kinds",
    [
        {"type": "longrope"},
        {"type": "su"},
        {"rope_type": "yarn"},
        # An old config, saved again by a newer version.
        {"rope_type": "longrope", "type": "su"},
    ],
)
def test_longrope_has_two_older_names(kinds):
    config = read_changed("phi3", rope_scaling=kinds | FACTORS, **{ORIGINAL: 16})
    assert config == read_changed("phi3", rope_scaling=LONG, **{ORIGINAL: 16})
    rope = rope_of(config)
    assert (rope.scaling, rope.factor, rope.original_context) == ("longrope", 16.0, 16)


def test_absent_original_context_is_4096():
    context = {"max_position_embeddings": 8192, "rope_scaling": LONG}
    rope = rope_of(read_changed("phi3", drop=(ORIGINAL,), **context))
    assert (rope.original_context, rope.factor) == (4096, 2.0)


def test_both_styles_give_one_config():
    new = {"rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    new |= {"long_factor": [4.0] * 6, "short_factor": [1.0] * 6, ORIGINAL: 16}
    old = {"type": "su", "long_factor": [4.0] * 6, "short_factor": [1.0] * 6}
    outer = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    first = read_changed("phi3", drop=outer, rope_parameters=new, **{ORIGINAL: 16})
    second = read_changed("phi3", rope_scaling=old, partial_rotary_factor=0.75, **{ORIGINAL: 16})
    assert first == second
    assert rope_of(first).dim == 12


def test_all_layers_have_the_window():
    windows = [s.attention.window for s in read_changed("phi3", sliding_window=9).layers]
    assert windows == [9, 9, 9]
    assert attention_of(read_changed("phi3", drop=("sliding_window",))).window is None


def test_keys_of_the_released_configs_are_understood():
    unused = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False}
    unused |= {"full_attn_mod": 1, "interpolate_factor": 1, "auto_map": {"AutoConfig": "x.Y"}}
    assert read_changed("phi3", **unused) == read_changed("phi3")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "su", "rope_type": "default"} | FACTORS}, "rope_type"),
        ({"rope_scaling": {"type": "su"}}, "long_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0] * 7}}, "long_factor"),
        ({"rope_scaling": LONG | {ORIGINAL: 32}, ORIGINAL: 16}, ORIGINAL),
        ({"rope_scaling": LONG, "partial_rotary_factor": 0.5}, "long_factor"),
        ({"rope_scaling": {"type": ["su"]}}, "type"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"lm_head_bias": True}, "lm_head_bias"),
        ({"full_attn_mod": 2}, "full_attn_mod"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_contradictions_and_absurd_values_are_refused(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed("phi3", **change)
