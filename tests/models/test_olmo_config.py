"""What configs of OLMo 2 and OLMo 3 say, and which of them are refused."""

import pytest
from config_reading import attention_of, read_changed, rope_of

from inferjax.errors import UnsupportedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["olmo2", "olmo3"])
def test_norms_follow_the_blocks_and_span_all_heads(name):
    layer = read_changed(name, rms_norm_eps=0.25).layers[0]
    assert (layer.norm_in, layer.norm_out, layer.norm_sum) == (False, True, False)
    assert (layer.attention.qk_norm, layer.attention.qk_norm_span) == (layer.norm, "all_heads")
    assert layer.norm.eps == 0.25
    assert read_changed(name, drop=("rms_norm_eps",)).layers[0].norm.eps == 1e-5


def test_olmo3_slides_in_three_of_four_layers_unless_told():
    windows = [s.attention.window for s in read_changed("olmo3", drop=("layer_types",)).layers]
    assert windows == [8, 8, 8, None]
    kinds = read_changed("olmo3", layer_types=[FULL, SLIDING, FULL, FULL]).layers
    assert [s.attention.window for s in kinds] == [None, 8, None, None]
    assert attention_of(read_changed("olmo3", drop=("sliding_window",))).window == 4096


def test_olmo3_scales_the_rope_of_global_layers_only():
    hub = {"rope_theta": 500_000, "rope_scaling": YARN}
    old = read_changed("olmo3", drop=("rope_parameters",), **hub)
    new = read_changed("olmo3", rope_parameters={FULL: YARN | PLAIN | YARN, SLIDING: PLAIN})
    assert old == new
    assert [rope_of(old, i).scaling for i in range(4)] == ["none", "none", "none", "yarn"]
    assert {rope_of(old, i).theta for i in range(4)} == {500_000.0}


def test_olmo3_ropes_may_differ_and_have_defaults():
    ropes = {FULL: None, SLIDING: {"rope_type": "default", "rope_theta": 1000.0}}
    config = read_changed("olmo3", rope_parameters=ropes)
    assert [rope_of(config, i).theta for i in (0, 3)] == [1000.0, 500_000.0]
    config = read_changed("olmo3", drop=("rope_parameters",))
    assert [rope_of(config, i).theta for i in (0, 3)] == [500_000.0, 500_000.0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # Versions of the reference give the local layers different bases.
        ({"rope_theta": 10_000.0, "rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": PLAIN}, "rope_parameters"),
        ({"rope_parameters": {FULL: PLAIN, "chunked_attention": PLAIN}}, "rope_parameters"),
        ({"rope_parameters": {FULL: PLAIN, SLIDING: [1]}}, "rope_parameters"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "factor": -1.0}}}, "factor"),
        ({"rope_parameters": [PLAIN]}, "rope_parameters"),
        ({"rope_scaling": YARN}, "rope_scaling"),
        ({"layer_types": [FULL] * 3}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_contradictions_and_absurd_values_are_refused(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed("olmo3", **change)
