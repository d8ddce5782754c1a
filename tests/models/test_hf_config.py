"""Strict reading of configs: both styles agree, and nothing unknown or absurd passes."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from inferjax.config import Attention, LatentAttention, MoE
from inferjax.errors import InferjaxError, UnsupportedConfig, UnsupportedModel
from inferjax.layers.rope import inverse_frequencies
from inferjax.models.family import read_config
from inferjax.models.ignored_keys import IGNORED_KEYS
from inferjax.models.registry import FAMILIES, family_for

NAMES = (
    *("llama", "llama3_rope", "llama_yarn", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2"),
    *("gemma", "gemma2", "phi3", "granite", "olmo2", "olmo3", "gpt_neox", "glm4"),
)


@pytest.fixture
def raw(tiny):
    def read(name):
        return json.loads((tiny / name / "config.json").read_text())

    return read


def parse(raw, **kwargs):
    return read_config(family_for(raw["model_type"], raw.get("architectures")), raw, **kwargs)


def to_new_style(raw):
    """Write a hub config as newer transformers would."""
    new = copy.deepcopy(raw)
    rope = {"rope_type": "default", **(new.pop("rope_scaling") or {})}
    rope["rope_theta"] = new.pop("rope_theta")
    new["rope_parameters"] = rope
    if "rope_local_base_freq" in new:
        sliding = {"rope_type": "default", "rope_theta": new.pop("rope_local_base_freq")}
        new["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    new["dtype"] = new.pop("torch_dtype")
    return new


@pytest.mark.parametrize("name", ["llama", "llama3_rope", "llama_yarn", "gemma3_text"])
def test_both_styles_give_one_config(raw, name):
    assert parse(to_new_style(raw(name))) == parse(raw(name))


def test_gemma_patterns_and_explicit_layer_types_agree(raw):
    old = raw("gemma3_text")
    new = copy.deepcopy(old)
    pattern = new.pop("sliding_window_pattern")
    kinds = ("full_attention", "sliding_attention")
    new["layer_types"] = [kinds[bool((i + 1) % pattern)] for i in range(6)]
    assert parse(new) == parse(old)
    windows = [spec.attention.window for spec in parse(old).layers]
    assert windows == [8, 8, 8, 8, 8, None]


def test_gemma_rope_scaling_is_only_the_global_layers(raw):
    config = raw("gemma3_text") | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ropes = [spec.attention.rope for spec in parse(config).layers]
    assert [rope.scaling for rope in ropes] == ["none"] * 5 + ["linear"]
    assert [rope.theta for rope in ropes] == [10_000.0] * 5 + [1_000_000.0]


@pytest.mark.parametrize("name", NAMES)
def test_unknown_key_is_refused_by_name(raw, name):
    with pytest.raises(UnsupportedConfig, match="rope_thetta"):
        parse(raw(name) | {"rope_thetta": 1e6})


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_matters_rejects_nonsense(raw, name):
    config = raw(name)
    family = family_for(config["model_type"])
    ignored = IGNORED_KEYS | family.ignored_keys | {"model_type"}
    for key in sorted(set(config) - ignored):
        for nonsense in ({"a": 1}, "nonsense", -1.5):
            with pytest.raises(InferjaxError) as error:
                parse(config | {key: nonsense})
            assert key in str(error.value) or "rope" in key, key


BAD = [
    ("llama", "hidden_size", 0),
    ("llama", "hidden_size", -64),
    ("llama", "hidden_size", 64.0),
    ("llama", "hidden_size", True),
    ("llama", "hidden_size", 10**30),
    ("llama", "num_hidden_layers", 10**7),
    ("llama", "num_hidden_layers", 0),
    ("llama", "num_key_value_heads", 3),
    ("llama", "head_dim", 15),
    ("llama", "rms_norm_eps", float("nan")),
    ("llama", "rms_norm_eps", float("inf")),
    ("llama", "rope_theta", 0),
    ("llama", "pretraining_tp", 2),
    ("llama", "hidden_act", "quick_gelu"),
    ("llama", "attention_bias", "false"),
    ("llama", "torch_dtype", "int8"),
    ("llama", "dtype", "float32"),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "is_encoder_decoder", True),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "eos_token_id", ["2"]),
    ("gemma3_text", "use_bidirectional_attention", True),
    ("gemma3_text", "layer_types", ["full_attention"]),
    ("gemma3_text", "layer_types", ["chunked_attention"] * 6),
    ("gemma3_text", "final_logit_softcapping", 0.0),
    ("gemma3_text", "query_pre_attn_scalar", 0),
    ("gpt_oss", "num_experts_per_tok", 5),
    ("gpt_oss", "experts_per_token", 3),
    ("gpt_oss", "hidden_act", "gelu"),
    ("deepseek_v3", "n_group", 3),
    ("deepseek_v3", "topk_group", 3),
    ("deepseek_v3", "num_experts_per_tok", 5),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("deepseek_v3", "topk_method", "greedy"),
    ("deepseek_v3", "num_key_value_heads", 2),
    ("deepseek_v3", "qk_head_dim", 31),
    ("gpt2", "add_cross_attention", True),
    ("gpt2", "n_head", 5),
    ("gpt2", "n_ctx", 64),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD)
def test_bad_value_is_refused_by_key(raw, name, key, value):
    with pytest.raises(UnsupportedConfig, match=key):
        parse(raw(name) | {key: value})


BAD_ROPES = [
    ({"rope_type": "mrope", "mrope_section": [2, 3]}, "mrope"),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "linear", "factor": 0}, "factor"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "type"),
    ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}, "original"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
        "high_freq_factor",
    ),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}, "beta_slow"),
    ({"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0]}, "short_factor"),
    ({"rope_type": "longrope", "long_factor": [0.0] * 8, "short_factor": [1.0] * 8}, "long"),
    ("yarn", "rope_scaling"),
]


@pytest.mark.parametrize(("settings", "named"), BAD_ROPES)
def test_bad_rope_is_refused_by_key(raw, settings, named):
    with pytest.raises(UnsupportedConfig, match=named):
        parse(raw("llama") | {"rope_scaling": settings})


def test_rope_rule_under_its_old_key_is_the_same(raw):
    new = raw("llama") | {"rope_scaling": {"rope_type": "linear", "factor": 2}}
    old = raw("llama") | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse(old) == parse(new)


def test_absent_original_context_is_the_declared_one(raw):
    config = parse(raw("llama") | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    assert config.layers[0].attention.rope.original_context == 256


def test_only_a_dynamic_rope_extends_the_context(raw):
    dynamic = raw("llama") | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert parse(dynamic).layers[0].attention.rope.max_context == 256
    extended = parse(dynamic, max_context=1024)
    assert extended.max_context == extended.layers[0].attention.rope.max_context == 1024
    assert parse(raw("llama"), max_context=100).max_context == 100
    with pytest.raises(UnsupportedConfig, match="1024"):
        parse(raw("llama"), max_context=1024)


def test_another_task_is_refused(raw):
    config = raw("llama") | {"architectures": ["LlamaForTokenClassification"]}
    with pytest.raises(UnsupportedModel, match="LlamaForTokenClassification"):
        parse(config)


def test_unknown_model_type_lists_the_known_ones():
    with pytest.raises(UnsupportedModel, match=r"mamba2.*\n.*deepseek_v3.*llama"):
        family_for("mamba2", ["Mamba2ForCausalLM"])
    with pytest.raises(UnsupportedModel):
        family_for(["llama"])


def test_quantized_weights_are_refused(raw):
    config = raw("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedModel, match="mxfp4"):
        parse(config)
    assert parse(raw("gpt_oss") | {"quantization_config": None}) == parse(raw("gpt_oss"))


def test_every_family_file_is_in_the_table_once():
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))


def test_token_ids_may_be_lists_null_or_outside(raw):
    config = parse(raw("llama") | {"eos_token_id": [2, 5, 999], "bos_token_id": None})
    assert (config.eos_ids, config.bos_id, config.pad_id) == ((2, 5), None, 0)
    assert parse(raw("llama") | {"pad_token_id": -1}).pad_id is None
    assert parse(raw("llama") | {"eos_token_id": None}).eos_ids == ()


def test_absent_optional_keys_take_the_family_defaults(raw):
    config = raw("llama")
    for key in ("head_dim", "num_key_value_heads", "architectures", "tie_word_embeddings"):
        del config[key]
    attention = parse(config).layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim) == (4, 16)
    gemma = raw("gemma3_text")
    del gemma["tie_word_embeddings"]
    assert parse(gemma).tied


def test_null_window_means_unlimited(raw):
    for name in ("gemma3_text", "gpt_oss"):
        layers = parse(raw(name) | {"sliding_window": None}).layers
        assert {spec.attention.window for spec in layers} == {None}


def test_deepseek_attention_scale_carries_mscale_squared(raw):
    rope = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    plain, scaled = (
        parse(raw("deepseek_v3") | {"rope_scaling": r}).layers[0].attention for r in (None, rope)
    )
    assert isinstance(scaled, LatentAttention)
    # 0.1 ln 40 + 1 = 1.3688879454
    assert scaled.scale / plain.scale == pytest.approx(1.3688879454**2)


def test_deepseek_layers_are_dense_then_experts(raw):
    kinds = [type(spec.ffn) for spec in parse(raw("deepseek_v3")).layers]
    assert [kind is MoE for kind in kinds] == [False, True, True]
    assert all(
        type(s.ffn) is MoE for s in parse(raw("deepseek_v3") | {"first_k_dense_replace": 0}).layers
    )


def test_gpt2_scales_by_layer_when_asked(raw):
    layers = parse(raw("gpt2") | {"scale_attn_by_inverse_layer_idx": True}).layers
    assert [spec.attention.scale for spec in layers] == [0.25, 0.125, 0.25 / 3]
    unscaled = parse(raw("gpt2") | {"scale_attn_weights": False})
    assert unscaled.layers[0].attention.scale == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_hashable_and_plain(raw, name):
    config = parse(raw(name))
    assert hash(config) == hash(parse(raw(name)))
    assert isinstance(config.layers[0].attention, Attention | LatentAttention)
    assert dataclasses.replace(config, vocab_size=1) != config


WEIRD = (
    None,
    [],
    {},
    "",
    "x" * 999,
    0,
    1,
    -1,
    2**31,
    10**40,
    1e-320,
    1e308,
    True,
    [[]],
    {"a": [1]},
)


@pytest.mark.parametrize("name", NAMES)
def test_mutated_configs_never_fail_otherwise(raw, name):
    original = raw(name)
    settings = original.get("rope_scaling") or original.get("rope_parameters") or {}
    places = [(original, key) for key in original] + [(settings, key) for key in settings]
    for place, key in places:
        for value in WEIRD:
            if place is original:
                config = original | {key: value}
            else:
                outer = "rope_scaling" if "rope_scaling" in original else "rope_parameters"
                config = original | {outer: settings | {key: value}}
            try:
                parsed = read_config(family_for(original["model_type"]), config)
            except InferjaxError:
                continue
            for spec in parsed.layers[:2]:
                if spec.attention.rope is not None:
                    assert np.isfinite(inverse_frequencies(spec.attention.rope)[0]).all()
