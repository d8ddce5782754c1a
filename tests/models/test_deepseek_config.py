"""What configs of DeepSeek-V2 say beyond those of V3, and which of both are refused."""

from typing import Any

import pytest
from config_reading import read_changed

from inferjax.config import MLP, LatentAttention, MoE
from inferjax.errors import UnsupportedConfig
from inferjax.layers.rope import yarn_mscale

# The keys of the released Lite model that the newer style has dropped.
LITE: dict[str, Any] = {
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
}


def experts_of(config):
    moe = config.layers[-1].ffn
    assert isinstance(moe, MoE)
    return moe


def attention_of(config):
    attention = config.layers[0].attention
    assert isinstance(attention, LatentAttention)
    return attention


def test_groups_are_ranked_by_their_best_expert():
    router = experts_of(read_changed("deepseek_v2")).router
    assert (router.kind, router.group_score, router.score_bias) == ("softmax", "best", False)
    assert (router.num_groups, router.groups_per_token, router.scale) == (4, 2, 4.0)


def test_a_greedy_choice_has_no_groups_whatever_the_keys_say():
    for groups in ({"n_group": None, "topk_group": None}, {"n_group": 4, "topk_group": 1}, {}):
        change: dict[str, Any] = LITE | groups
        router = experts_of(read_changed("deepseek_v2", **change)).router
        assert (router.num_groups, router.groups_per_token) == (1, 1)
    absent = read_changed("deepseek_v2", drop=("topk_method", "routed_scaling_factor"))
    assert experts_of(absent).router.num_groups == 1
    assert experts_of(absent).router.scale == 1.0


def test_lite_has_unfactored_queries():
    attention = attention_of(read_changed("deepseek_v2", **LITE))
    assert (attention.q_rank, attention.rope.interleaved) == (None, True)


def test_which_layers_have_experts():
    def sparse(**change):
        layers = read_changed("deepseek_v2", num_hidden_layers=5, **change).layers
        return [isinstance(spec.ffn, MoE) for spec in layers]

    assert sparse() == [False, True, True, True, True]
    assert sparse(first_k_dense_replace=3) == [False, False, False, True, True]
    assert sparse(first_k_dense_replace=1, moe_layer_freq=2) == [False, False, True, False, True]
    bare = read_changed("deepseek_v2", drop=("first_k_dense_replace",))
    assert isinstance(bare.layers[0].ffn, MoE)


def test_shared_experts_are_one_block_with_the_biases_of_dense_ones():
    assert experts_of(read_changed("deepseek_v2")).shared == MLP(ffn_dim=64)
    biased = experts_of(read_changed("deepseek_v2", mlp_bias=True, n_shared_experts=3))
    assert biased.shared == MLP(ffn_dim=96, bias=True)


def test_yarn_sharpens_the_scale_by_the_square_of_its_temperature():
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    scale = attention_of(read_changed("deepseek_v2")).scale
    yarn = attention_of(read_changed("deepseek_v2", rope_parameters=rope)).scale
    assert yarn == pytest.approx(scale * yarn_mscale(40.0, 0.7) ** 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # The reference ignores it, DeepSeek's own code does not.
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "noaux_tc"}, "topk_method"),
        ({"n_group": None}, "n_group"),
        ({"n_group": 3}, "n_group"),
        ({"topk_group": None}, "topk_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"qk_head_dim": 23}, "qk_head_dim"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"num_experts": 9}, "num_experts"),
    ],
)
def test_contradictions_are_refused_by_key(change, named):
    with pytest.raises(UnsupportedConfig, match=named):
        read_changed("deepseek_v2", **change)


@pytest.mark.parametrize(
    ("drop", "change"),
    [
        ("topk_group", {"n_group": 2}),
        ("num_experts_per_tok", {"n_group": 2, "topk_group": 1}),
        ("n_group", {"n_routed_experts": 12}),
    ],
)
def test_v3_defaults_that_other_keys_rule_out_are_refused(drop, change):
    with pytest.raises(UnsupportedConfig, match=drop):
        read_changed("deepseek_v3", drop=(drop,), **change)
