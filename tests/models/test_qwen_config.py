"""What configs of Qwen 2 and Qwen 3, with and without experts, say, and which are refused."""

import pytest
from config_reading import attention_of, read_changed

from inferjax.config import MLP, MoE
from inferjax.errors import UnsupportedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
ON = {"use_sliding_window": True, "sliding_window": 8}
DENSE, SPARSE = ("qwen2", "qwen3"), ("qwen2_moe", "qwen3_moe")


def windows_of(config):
    return [spec.attention.window for spec in config.layers]


def sparse(config):
    return [isinstance(spec.ffn, MoE) for spec in config.layers]


def experts_of(config, layer=0):
    moe = config.layers[layer].ffn
    assert isinstance(moe, MoE)
    return moe


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    ("first", "windows"), [(0, [8] * 3), (2, [None, None, 8]), (3, [None] * 3)]
)
def test_windows_begin_after_the_first_layers(name, first, windows):
    config = read_changed(name, drop=("layer_types",), max_window_layers=first, **ON)
    assert windows_of(config) == windows


@pytest.mark.parametrize("name", [*DENSE, "qwen2_moe"])
def test_layer_types_win_over_the_number_of_layers(name):
    config = read_changed(name, layer_types=[SLIDING, FULL, SLIDING], max_window_layers=3, **ON)
    assert windows_of(config) == [8, None, 8]


def test_windows_of_qwen2_moe_alternate_in_the_first_layers():
    assert windows_of(read_changed("qwen2_moe", max_window_layers=3, **ON)) == [8, None, 8]
    assert windows_of(read_changed("qwen2_moe", max_window_layers=2, **ON)) == [8, None, None]


def test_a_window_of_qwen3_moe_is_on_all_layers():
    config = read_changed("qwen3_moe", max_window_layers=2, **ON)
    assert windows_of(config) == [8] * 3
    assert read_changed("qwen3_moe", layer_types=[SLIDING] * 3, **ON) == config


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
def test_no_window_without_the_switch(name):
    for window in (8, 0, None):
        config = read_changed(name, use_sliding_window=False, sliding_window=window)
        assert windows_of(config) == [None] * 3
    drop = ("sliding_window", "max_window_layers", "layer_types")
    absent = read_changed(name, drop=drop, use_sliding_window=True, num_hidden_layers=29)
    last = {"qwen2_moe": None}.get(name, 4096)
    assert windows_of(absent)[28] == last


def test_which_projections_have_biases():
    def biases(config):
        attention = attention_of(config)
        return attention.qkv_bias, attention.out_bias

    assert biases(read_changed("qwen2")) == (True, False)
    assert biases(read_changed("qwen2_moe", drop=("qkv_bias",))) == (True, False)
    assert biases(read_changed("qwen2_moe", qkv_bias=False)) == (False, False)
    for name in ("qwen3", "qwen3_moe"):
        assert biases(read_changed(name, drop=("attention_bias",))) == (False, False)
        assert biases(read_changed(name, attention_bias=True)) == (True, True)


def test_qwen3_heads_are_normalised_and_their_width_has_a_default():
    for name in ("qwen3", "qwen3_moe"):
        config = read_changed(name, rms_norm_eps=0.25)
        attention = attention_of(config)
        assert (attention.qk_norm, attention.qk_norm_span) == (config.layers[0].norm, "head")
    bare = read_changed("qwen3", drop=("head_dim", "num_key_value_heads"), num_attention_heads=32)
    assert (attention_of(bare).head_dim, attention_of(bare).num_kv_heads) == (128, 32)
    assert attention_of(read_changed("qwen3_moe", drop=("head_dim",))).head_dim == 16


@pytest.mark.parametrize("name", SPARSE)
def test_which_layers_have_experts(name):
    def layers(**change):
        return sparse(read_changed(name, num_hidden_layers=4, **change))

    assert layers(mlp_only_layers=[], decoder_sparse_step=1) == [True] * 4
    assert layers(mlp_only_layers=None, decoder_sparse_step=2) == [False, True] * 2
    assert layers(mlp_only_layers=[1, 9], decoder_sparse_step=2) == [False, False, False, True]
    assert layers(mlp_only_layers=[0, 1, 2, 3], decoder_sparse_step=1) == [False] * 4


def test_routers_normalise_only_if_asked():
    for name in SPARSE:
        asked = experts_of(read_changed(name, norm_topk_prob=True)).router
        assert (asked.kind, asked.normalize) == ("softmax", True)
        assert not experts_of(read_changed(name, drop=("norm_topk_prob",))).router.normalize


def test_only_qwen2_moe_has_a_shared_expert_with_a_gate():
    moe = experts_of(read_changed("qwen2_moe"))
    assert (moe.shared, moe.shared_gate, moe.ffn_dim) == (MLP(ffn_dim=80), True, 32)
    moe = experts_of(read_changed("qwen3_moe"))
    assert (moe.shared, moe.shared_gate) == (None, False)


def test_experts_are_counted_under_either_name():
    plain = read_changed("qwen3_moe")
    assert read_changed("qwen3_moe", drop=("num_local_experts",), num_experts=8) == plain
    assert read_changed("qwen3_moe", num_experts=8) == plain


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ("qwen2", {"sliding_window": "8"}, "sliding_window"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
        # Sliding layers need the switch and a window.
        ("qwen2", {"sliding_window": 8, "layer_types": [SLIDING] * 3}, "layer_types"),
        ("qwen3", {"use_sliding_window": True, "layer_types": [SLIDING] * 3}, "layer_types"),
        ("qwen2_moe", {"layer_types": [SLIDING, FULL, FULL]}, "layer_types"),
        ("qwen3", {"layer_types": [FULL] * 2}, "layer_types"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("qwen3_moe", ON | {"layer_types": [FULL, SLIDING, SLIDING]}, "layer_types"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts says 4"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_local_experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [1.0]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
    ],
)
def test_contradictions_are_refused_by_key(name, change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed(name, **change)
