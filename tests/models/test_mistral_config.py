"""What configs of Mistral, Mixtral and SmolLM3 say, and which of them are refused."""

from typing import Any

import pytest
from config_reading import attention_of, read_changed, rope_of

from inferjax.config import MoE
from inferjax.errors import UnsupportedConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def windows_of(config):
    return [spec.attention.window for spec in config.layers]


@pytest.mark.parametrize(
    ("name", "default", "theta"), [("mistral", 4096, 10_000.0), ("mixtral", None, 1_000_000.0)]
)
def test_one_window_is_on_all_layers_or_none(name, default, theta):
    assert windows_of(read_changed(name, sliding_window=9)) == [9] * 3
    assert windows_of(read_changed(name, sliding_window=None)) == [None] * 3
    bare = read_changed(name, drop=("sliding_window", "rope_theta", "rope_parameters"))
    assert windows_of(bare) == [default] * 3
    assert rope_of(bare).theta == theta


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_absent_heads_are_eight_and_null_is_one_each(name):
    change: dict[str, Any] = {"num_attention_heads": 16, "head_dim": 4}
    absent = read_changed(name, drop=("num_key_value_heads",), **change)
    assert attention_of(absent).num_kv_heads == 8
    null = read_changed(name, num_key_value_heads=None, **change)
    assert attention_of(null).num_kv_heads == 16
    assert attention_of(read_changed(name, head_dim=None)).head_dim == 16
    assert attention_of(read_changed(name, head_dim=6)).scale == 6**-0.5


def test_layer_types_may_only_repeat_the_window():
    plain = read_changed("mistral", sliding_window=8)
    assert read_changed("mistral", sliding_window=8, layer_types=[SLIDING] * 3) == plain
    for types in ([FULL] * 3, [SLIDING, FULL, SLIDING], [SLIDING] * 2):
        with pytest.raises(UnsupportedConfig, match="layer_types"):
            read_changed("mistral", sliding_window=8, layer_types=types)
    with pytest.raises(UnsupportedConfig, match="layer_types"):
        read_changed("mistral", sliding_window=None, layer_types=[SLIDING] * 3)


def test_mixtral_weighs_the_chosen_experts_by_a_softmax_over_them():
    moe = read_changed("mixtral").layers[0].ffn
    assert isinstance(moe, MoE)
    assert (moe.router.kind, moe.router.num_experts, moe.ffn_dim) == ("softmax_topk", 4, 112)
    assert read_changed("mixtral", drop=("rms_norm_eps",)).layers[0].norm.eps == 1e-5
    renamed = read_changed("mixtral", drop=("num_local_experts",), num_experts=4)
    assert renamed == read_changed("mixtral", num_experts=4) == read_changed("mixtral")


def test_smollm3_leaves_every_fourth_layer_without_a_rope():
    def roped(config):
        return [spec.attention.rope is not None for spec in config.layers]

    bare = ("no_rope_layers", "no_rope_layer_interval")
    assert roped(read_changed("smollm3", drop=bare)) == [True, True, True, False]
    assert (
        roped(read_changed("smollm3", drop=bare[:1], no_rope_layer_interval=2)) == [True, False] * 2
    )
    # The list wins, and may be longer than the model.
    marks = [0, 1, 0, 1, 1]
    assert roped(read_changed("smollm3", no_rope_layers=marks)) == [False, True, False, True]
    none = read_changed("smollm3", drop=bare[:1], no_rope_layer_interval=1)
    assert (roped(none), none.max_context) == ([False] * 4, 256)


def test_smollm3_windows_are_on_layers_without_a_rope_unless_told():
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows_of(read_changed("smollm3", drop=("layer_types",), **on)) == [None, None, None, 8]
    told = read_changed("smollm3", layer_types=[SLIDING, FULL, FULL, FULL], **on)
    assert windows_of(told) == [8, None, None, None]
    unlimited = read_changed("smollm3", drop=("sliding_window",), use_sliding_window=True)
    assert windows_of(unlimited) == [None] * 4


def test_smollm3_has_defaults_of_its_own():
    drop = ("tie_word_embeddings", "rope_parameters", "num_key_value_heads")
    config = read_changed("smollm3", drop=drop, num_attention_heads=8)
    assert (config.tied, rope_of(config).theta) == (True, 2_000_000.0)
    assert attention_of(config).num_kv_heads == 4
    # Keys that the released config took over from other families.
    assert read_changed("smollm3", pretraining_tp=2, max_window_layers=28) == read_changed(
        "smollm3"
    )


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("mistral", {"head_dim": 7}, "head_dim"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mixtral", {"num_experts": 8}, "num_experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [True] * 4}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        # Versions of attention disagree about a window that is listed and switched off.
        ("smollm3", {"sliding_window": 8, "layer_types": [SLIDING] * 4}, "layer_types"),
        ("smollm3", {"use_sliding_window": True, "layer_types": [SLIDING] * 4}, "layer_types"),
    ],
)
def test_contradictions_are_refused_by_key(name, change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed(name, **change)
