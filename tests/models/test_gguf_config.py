"""GGUF metadata as configs: strict in every architecture, and what each says in its own way."""

import json
import math

import numpy as np
import pytest
from gguf_metadata import LEAST, config, metadata, raw_config

from inferjax.config import Pooling
from inferjax.errors import UnsupportedConfig, UnsupportedModel
from inferjax.models.family import read_config
from inferjax.models.gguf_config import read_pooling_type
from inferjax.models.registry import FAMILIES, gguf_family_for

ROTATING = sorted(set(LEAST) - {"gpt2"})


def test_every_architecture_is_tested():
    assert set(LEAST) == {family.gguf.architecture for family in FAMILIES if family.gguf}


@pytest.mark.parametrize("architecture", LEAST)
def test_least_metadata_is_enough(architecture):
    facts = config(architecture)
    assert (facts.num_layers, facts.model_dim, facts.max_context) == (4, 64, 256)
    assert facts.vocab_size == 320
    assert facts.layers[0].norm.eps == pytest.approx(1e-5)


@pytest.mark.parametrize("architecture", LEAST)
def test_every_least_key_is_needed(architecture):
    needed = ["block_count", "context_length", "embedding_length", "attention.head_count"]
    needed += [key for key in LEAST[architecture] if key.endswith("epsilon")]
    for key in needed:
        with pytest.raises(UnsupportedConfig, match=f"no {key}"):
            config(architecture, **{key: None})


@pytest.mark.parametrize("architecture", LEAST)
@pytest.mark.parametrize(
    "key",
    ["attention.clamp_kqv", "attention.max_alibi_bias", "rope.dimension_sections", "whatever"],
)
def test_an_unknown_key_is_refused(architecture, key):
    with pytest.raises(UnsupportedConfig, match=key):
        config(architecture, **{key: 1})


@pytest.mark.parametrize("architecture", LEAST)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", True),
        ("embedding_length", 64.0),
        ("attention.head_count", np.array([4, 4, 2, 4], np.int32)),
        ("attention.causal", False),
        ("context_length", "256"),
    ],
)
def test_a_wrong_value_is_refused(architecture, key, value):
    with pytest.raises(UnsupportedConfig, match=key):
        config(architecture, **{key: value})


@pytest.mark.parametrize("architecture", ROTATING)
def test_every_rope_has_its_base(architecture):
    ropes = {spec.attention.rope for spec in config(architecture, **{"rope.freq_base": 7e5}).layers}
    assert 7e5 in {rope.theta for rope in ropes if rope}


@pytest.mark.parametrize("architecture", sorted(set(LEAST) - {"gemma3", "gpt2", "gpt-oss"}))
def test_numbers_may_be_listed_by_layer(architecture):
    same = np.full(4, LEAST[architecture].get("attention.head_count_kv", 4), np.int32)
    assert config(architecture, **{"attention.head_count_kv": same}) == config(architecture)


@pytest.mark.parametrize(
    "other", ["general.name", "quantize.imatrix.file", "split.count", "llamax.y"]
)
def test_keys_without_the_prefix_are_no_concern(other):
    found = metadata("llama") | {other: 1}
    family, _ = gguf_family_for(found)
    assert family.name == "llama"


def test_an_unknown_architecture_lists_the_known():
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*\n.*command-r, deepseek2"):
        gguf_family_for({"general.architecture": "mamba"})


@pytest.mark.parametrize(
    ("changed", "family"),
    [
        ({}, "llama"),
        ({"expert_count": 0, "attention.sliding_window": 0}, "llama"),
        ({"attention.sliding_window": 16}, "mistral"),
        ({"expert_count": 8}, "mixtral"),
        ({"expert_count": 8, "attention.sliding_window": 16}, "mixtral"),
    ],
)
def test_llamas_relatives_are_told_apart(changed, family):
    assert gguf_family_for(metadata("llama", **changed))[0].name == family


def test_windows_of_llamas_relatives():
    window = {"attention.sliding_window": 16}
    assert config("llama", **window).layers[0].attention.window == 16
    experts = {"expert_count": 8, "expert_used_count": 2}
    assert config("llama", **window, **experts).layers[3].attention.window == 16
    assert config("llama", **experts).layers[3].attention.window is None


def test_mixtral_has_experts_of_one_width():
    experts = {"expert_count": 8, "expert_used_count": 2}
    facts = config("llama", **experts, **{"expert_feed_forward_length": 112})
    assert facts.layers[0].ffn.ffn_dim == 112
    with pytest.raises(UnsupportedConfig, match="expert_feed_forward_length"):
        config("llama", **experts, **{"expert_feed_forward_length": 48})


@pytest.mark.parametrize("architecture", ["qwen2", "gemma", "granite", "smollm3"])
def test_experts_where_none_are_known_are_refused(architecture):
    with pytest.raises(UnsupportedConfig, match="expert_count"):
        config(architecture, expert_count=8)


def test_biases_follow_from_tensors():
    assert not config("llama").layers[0].attention.qkv_bias
    names = ["blk.0.attn_q.bias", "blk.0.ffn_up.bias"]
    spec = config("llama", names).layers[0]
    assert spec.attention.qkv_bias
    assert spec.attention.out_bias
    assert spec.ffn.bias
    assert config("qwen3", ["blk.0.attn_qkv.bias"]).layers[0].attention.qkv_bias


def test_a_head_of_its_own_unties():
    assert config("llama").tied
    assert not config("llama", ["output.weight"]).tied


def test_gemma2_has_the_values_of_its_releases():
    facts = config("gemma2")
    assert [s.attention.window for s in facts.layers] == [4096, None, 4096, None]
    assert {s.attention.softcap for s in facts.layers} == {50.0}
    assert facts.final_softcap == 30.0
    assert facts.layers[0].attention.scale == 16**-0.5
    large = config(
        "gemma2", **{"block_count": 46, "attention.key_length": 8, "attention.value_length": 8}
    )
    assert large.layers[0].attention.scale == 16**-0.5


def test_gemma2_states_other_values():
    facts = config("gemma2", attn_logit_softcapping=20.0, **{"attention.sliding_window_pattern": 4})
    assert [s.attention.window for s in facts.layers] == [4096, 4096, 4096, None]
    assert facts.layers[0].attention.softcap == 20.0
    with pytest.raises(UnsupportedConfig, match="softcapping"):
        config("gemma2", attn_logit_softcapping=0.0)
    with pytest.raises(UnsupportedConfig, match="freq_base_swa"):
        config("gemma2", **{"rope.freq_base_swa": 5e5})


def test_gemma3_without_a_window_is_global():
    assert {s.attention.window for s in config("gemma3").layers} == {None}
    ropes = {s.attention.rope.theta for s in config("gemma3", **{"rope.freq_base": 1e6}).layers}
    assert ropes == {1e6}
    assert config("gemma3", **{"attention.sliding_window_pattern": 1}) == config("gemma3")
    with pytest.raises(UnsupportedConfig, match="sliding_window"):
        config("gemma3", **{"attention.sliding_window_pattern": 6})


@pytest.mark.parametrize("kinds", [np.array([True, False, True, True]), [1, 0, 1, 1]])
def test_layers_are_listed(kinds):
    keys = {"attention.sliding_window": 8, "attention.sliding_window_pattern": kinds}
    windows = [s.attention.window for s in config("gemma3", **keys).layers]
    assert windows == [8, None, 8, 8]
    with pytest.raises(UnsupportedConfig, match="sliding_window_pattern"):
        config("gemma3", **keys | {"attention.sliding_window_pattern": kinds[:3]})


def test_olmo_with_a_window_is_the_third():
    facts = config("olmo2", **{"attention.sliding_window": 8, "rope.freq_base": 1e6})
    assert facts.family == "olmo3"
    assert [s.attention.window for s in facts.layers] == [8, 8, 8, None]
    assert {s.attention.rope.theta for s in facts.layers} == {1e6}
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "attention.sliding_window": 8}
    ropes = [s.attention.rope.scaling for s in config("olmo2", **keys).layers]
    assert ropes == ["none", "none", "none", "yarn"]


def test_phi3_windows():
    def window(**changed):
        return config("phi3", **changed).layers[0].attention.window

    assert window() is None
    assert window(context_length=4096) == 2047
    assert window(context_length=4096, **{"attention.sliding_window": 0}) is None
    assert window(**{"attention.sliding_window": 8}) == 8


def test_starcoder2_has_the_window_of_its_releases():
    assert config("starcoder2").layers[0].attention.window == 4096
    keys = {"attention.sliding_window": 8}
    assert config("starcoder2", **keys).layers[0].attention.window == 8
    assert not config("starcoder2").layers[0].ffn.bias
    assert config("starcoder2", ["blk.0.attn_q.bias"]).layers[0].ffn.bias


@pytest.mark.parametrize(
    ("architecture", "dims"), [("phi3", 12), ("gptneox", 4), ("stablelm", 4), ("glm4", 8)]
)
def test_heads_may_be_rotated_in_part(architecture, dims):
    rope = config(architecture, **{"rope.dimension_count": dims}).layers[0].attention.rope
    assert rope.dim == dims


@pytest.mark.parametrize("width", [48, 49, 80, 96, 112, 128])
def test_no_share_of_a_head_is_rounded_away(width):
    keys = {"attention.key_length": width, "attention.value_length": width}
    for dims in range(2, width + 1, 2):
        facts = config("phi3", **keys, **{"rope.dimension_count": dims})
        assert facts.layers[0].attention.rope.dim == dims


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma", "olmo2", "starcoder2"])
def test_whole_heads_are_rotated_elsewhere(architecture):
    with pytest.raises(UnsupportedConfig, match="dimension_count"):
        config(architecture, **{"rope.dimension_count": 8})


def test_values_as_wide_as_keys():
    with pytest.raises(UnsupportedConfig, match="value_length"):
        config("llama", **{"attention.key_length": 16, "attention.value_length": 8})
    with pytest.raises(UnsupportedConfig, match="value_length"):
        config("llama", **{"attention.key_length": 32})


@pytest.mark.parametrize("key", ["attention.key_length", "attention.head_count_kv"])
def test_gpt2_heads_are_even(key):
    with pytest.raises(UnsupportedConfig, match=key):
        config("gpt2", **{key: 2})


def test_gptneox_residual():
    assert config("gptneox").layers[0].residual == "parallel"
    assert config("gptneox", use_parallel_residual=False).layers[0].residual == "serial"
    with pytest.raises(UnsupportedConfig, match="use_parallel_residual"):
        config("gptneox", use_parallel_residual=1)


def test_stablelm_residual_follows_from_its_norms():
    serial = ["blk.0.ffn_norm.weight"]
    for said in (None, True, False):
        facts = config("stablelm", serial, use_parallel_residual=said)
        assert facts.layers[0].residual == "serial"
    assert config("stablelm").layers[0].residual == "parallel_shared"
    with pytest.raises(UnsupportedConfig, match="use_parallel_residual"):
        config("stablelm", use_parallel_residual=False)


def test_granite_multipliers():
    facts = config("granite")
    assert facts.layers[0].attention.scale == 0.25
    assert (facts.embed_scale, facts.layers[0].residual_scale) == (1.0, 1.0)
    assert facts.logit_scale == 0.125
    keys = {"attention.scale": 0.5, "embedding_scale": 12.0, "residual_scale": 0.25}
    facts = config("granite", **keys)
    assert facts.layers[0].attention.scale == 0.5
    assert (facts.embed_scale, facts.layers[0].residual_scale) == (12.0, 0.25)
    assert config("granite", **dict.fromkeys(keys, 0.0)) == config("granite")
    with pytest.raises(UnsupportedConfig, match="finetuned"):
        config("granite", **{"rope.scaling.finetuned": False})


def test_command_r_scale():
    assert config("command-r").logit_scale == 1.0
    assert config("command-r", logit_scale=0.0625).logit_scale == 0.0625
    attention = config("command-r", ["blk.0.attn_q_norm.weight"]).layers[0].attention
    assert attention.qk_norm
    assert not config("command-r").layers[0].attention.qk_norm


def test_smollm3_has_layers_without_a_rope():
    ropes = [s.attention.rope is not None for s in config("smollm3").layers]
    assert ropes == [True, True, True, False]


def test_qwen_experts():
    facts = config("qwen2moe")
    ffn = facts.layers[0].ffn
    assert (ffn.ffn_dim, ffn.shared.ffn_dim, ffn.router.normalize) == (56, 112, False)
    keys = {"expert_feed_forward_length": 48, "expert_shared_feed_forward_length": 80}
    ffn = config("qwen2moe", **keys).layers[0].ffn
    assert (ffn.ffn_dim, ffn.shared.ffn_dim) == (48, 80)
    assert config("qwen3moe").layers[0].ffn.router.normalize
    ffn = config("qwen3moe", expert_weights_norm=False).layers[0].ffn
    assert not ffn.router.normalize


def test_layers_without_experts_follow_from_tensors():
    facts = config("qwen3moe", ["blk.1.ffn_gate.weight"])
    assert [type(s.ffn).__name__ for s in facts.layers] == ["MoE", "MLP", "MoE", "MoE"]


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe", "gpt-oss", "deepseek2"])
@pytest.mark.parametrize(
    "changed",
    [
        {"expert_count": 0},
        {"expert_used_count": 0},
        {"expert_used_count": 9},
        {"expert_count": None},
    ],
)
def test_counts_of_experts_are_checked(architecture, changed):
    with pytest.raises(UnsupportedConfig, match="expert"):
        config(architecture, **changed)


def test_gpt_oss_without_scaling_has_none():
    assert config("gpt-oss").layers[0].attention.rope.scaling == "none"
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0}
    rope = config("gpt-oss", **keys).layers[0].attention.rope
    assert (rope.scaling, rope.factor, rope.truncate) == ("yarn", 32.0, False)
    windows = [s.attention.window for s in config("gpt-oss").layers]
    assert windows == [8, None, 8, None]
    with pytest.raises(UnsupportedConfig, match="freq_base_swa"):
        config("gpt-oss", **{"rope.freq_base_swa": 5e5})


OLD_LATENT = {
    "attention.head_count_kv": 4,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": None,
    "attention.value_length_mla": None,
}


def test_old_and_new_deepseek_keys_say_the_same():
    facts = config("deepseek2")
    assert facts.family == "deepseek_v2"
    attention = facts.layers[0].attention
    assert (attention.nope_dim, attention.rope_dim, attention.value_dim) == (16, 8, 16)
    assert attention.q_rank is None
    assert config("deepseek2", **OLD_LATENT) == facts
    assert config("deepseek2", **{"attention.q_lora_rank": 32}).layers[0].attention.q_rank == 32


@pytest.mark.parametrize(
    "changed",
    [
        {"attention.head_count_kv": 4},
        {"attention.key_length": 24},
        {"attention.value_length": 16},
        {**OLD_LATENT, "attention.head_count_kv": 1},
        {"attention.key_length_mla": 8},
        {"nextn_predict_layers": 1},
        {"expert_gating_func": 3},
        {"expert_group_count": 3},
        {"expert_group_count": 2, "expert_group_used_count": 3},
        {"expert_weights_norm": True},
        {"attention.temperature_scale": 0.1},
    ],
)
def test_deepseek_contradictions_are_refused(changed):
    with pytest.raises(UnsupportedConfig):
        config("deepseek2", **changed)


def test_deepseek_versions_are_told_by_the_router():
    v3 = config("deepseek2", expert_gating_func=2, expert_weights_norm=True)
    router = v3.layers[0].ffn.router
    assert (v3.family, router.kind, router.normalize) == ("deepseek_v3", "sigmoid", True)
    assert (router.num_groups, router.groups_per_token) == (1, 1)
    old = config("deepseek2", expert_gating_func=2, expert_count=256).layers[0].ffn.router
    assert (old.num_groups, old.groups_per_token) == (8, 4)
    old = config("deepseek2", expert_count=160).layers[0].ffn.router
    assert (old.num_groups, old.groups_per_token) == (8, 3)
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    grouped = config("deepseek2", **groups).layers[0].ffn.router
    assert (grouped.num_groups, grouped.groups_per_token, grouped.group_score) == (4, 2, "best")
    dense = config("deepseek2", leading_dense_block_count=1)
    assert [type(s.ffn).__name__ for s in dense.layers[:2]] == ["MLP", "MoE"]


def test_deepseek_stores_a_tenth_of_its_mscale():
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 8.0,
        "rope.scaling.yarn_log_multiplier": 0.0707,
    }
    attention = config("deepseek2", **keys).layers[0].attention
    assert attention.rope.mscale == pytest.approx(0.707)
    assert attention.scale == pytest.approx(24**-0.5 * (0.0707 * math.log(8.0) + 1) ** 2)


def test_raw_config_names_its_family():
    assert raw_config("gptneox")["model_type"] == "gpt_neox"
    assert raw_config("gpt2")["n_inner"] == 112


@pytest.mark.parametrize("architecture", LEAST)
def test_raw_config_can_be_saved(architecture):
    raw = raw_config(architecture, **{"attention.head_count": np.full(4, 4, np.uint32)})
    family, _ = gguf_family_for(metadata(architecture))
    assert read_config(family, json.loads(json.dumps(raw))) == config(architecture)


def test_more_layers_than_any_model_has_are_refused():
    for architecture in ("llama", "qwen3moe", "gemma3"):
        with pytest.raises(UnsupportedConfig, match="block_count"):
            config(architecture, block_count=10_001)


@pytest.mark.parametrize(
    ("number", "kind"), [(None, None), (0, None), (1, "mean"), (2, "first"), (3, "last")]
)
def test_pooling_is_read(number, kind):
    found = read_pooling_type(metadata("qwen3", pooling_type=number), "qwen3")
    assert found == (kind and Pooling(kind=kind, normalize=True))
    assert config("qwen3", pooling_type=number).num_layers == 4


@pytest.mark.parametrize("number", [4, -1, "3"])
def test_pooling_with_a_head_is_refused(number):
    with pytest.raises(UnsupportedConfig, match="pooling_type"):
        read_pooling_type(metadata("qwen3", pooling_type=number), "qwen3")
