"""Bytes of weights that do not exist yet, against those of weights that do."""

import jax
import pytest
from tiny_models import FAMILIES, ONE_EACH, tiny_model

from inferjax.checkpoint.opened import read_model_config
from inferjax.models.params import abstract_params
from inferjax.models.quantized import PackedForm, quantize
from inferjax.planner import make_model, public_config
from inferjax.planner.leaves import (
    bits_per_weight,
    loaded_leaves,
    packed_bytes,
    uniform_leaves,
)
from inferjax.planner.public_models import HUB_IDS
from inferjax.quant.leaf import is_packed, size_of
from inferjax.quant.schemes import SCHEMES

# The number of parameters that each model's page on the hub states.
STATED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
    "smollm2-135m-instruct": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
}


@pytest.mark.parametrize("name", HUB_IDS)
def test_public_model_has_the_stated_parameters(name):
    config = public_config(name)
    model = make_model(config)
    assert config.dtype == "bfloat16"
    assert model.weight_bytes >= 2 * model.num_parameters
    if name in STATED:
        assert model.num_parameters == STATED[name]
    # Pages of the larger Gemma 3 count the encoder of images too: 4.3, 12.2 and 27.4 billion.
    vision = {"gemma-3-4b": 4.30, "gemma-3-12b": 12.19, "gemma-3-27b": 27.43}
    if name in vision:
        assert 0.40e9 < vision[name] * 1e9 - model.num_parameters < 0.45e9


def test_public_model_is_found_by_its_hub_id():
    assert public_config("meta-llama/Meta-Llama-3-70B") == public_config("Llama-3-70B")


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_active_parameters_are_those_that_the_makers_state(name):
    stated = {"deepseek-v3": 37e9, "mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9}[name]
    active = make_model(public_config(name)).num_active_parameters
    assert active == pytest.approx(stated, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes_are_those_of_the_loaded_weights(family):
    model = tiny_model(family)
    config = model.config
    real = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert sum(leaf.num_bytes for leaf in uniform_leaves(config)) == real
    assert sum(leaf.num_bytes for leaf in loaded_leaves(config, model.params)) == real


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "qwen3"])
def test_weight_bytes_are_those_of_packed_weights(family, scheme, tiny):
    config = read_model_config(tiny / family)
    params = abstract_params(config)
    packed = jax.eval_shape(lambda params: quantize(params, config, scheme), params)
    real = sum(size_of(leaf) for leaf in jax.tree.leaves(packed, is_leaf=is_packed))
    assert sum(leaf.num_bytes for leaf in uniform_leaves(config, scheme=scheme)) == real
    assert sum(leaf.num_bytes for leaf in loaded_leaves(config, packed)) == real


@pytest.mark.parametrize("family", ONE_EACH)
def test_weight_bytes_are_those_of_packed_weights_in_every_family(family, tiny):
    config = read_model_config(tiny / family)
    packed = jax.eval_shape(lambda p: quantize(p, config, "int4"), abstract_params(config))
    real = sum(size_of(leaf) for leaf in jax.tree.leaves(packed, is_leaf=is_packed))
    assert sum(leaf.num_bytes for leaf in uniform_leaves(config, scheme="int4")) == real


def test_packed_bytes_by_hand():
    # 100 rows are 13 words of 8 codes, 20 columns are two blocks of 16.
    codes = 32 * 13 * 4
    assert packed_bytes(PackedForm(format="int4"), 100, 20) == codes + 32 * 4
    # 100 rows are 4 groups of 32, each with a scale and a minimum of 4 bytes.
    grouped = PackedForm(format="int4", group=32, minimum=True)
    assert packed_bytes(grouped, 100, 20) == codes + 32 * 4 * 2 * 4
    half = PackedForm(format="int4", group=32, minimum=True, scale_dtype="float16")
    assert packed_bytes(half, 100, 20) == codes + 32 * 4 * 2 * 2
    assert packed_bytes(PackedForm(format="bfloat16"), 101, 20) == 32 * 102 * 2
    assert packed_bytes(PackedForm(format="int8", permuted=True), 100, 20, stack=3) == 3 * (
        32 * 100 + 32 * 4 + 100 * 4
    )


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [(None, 16), ("int8", 8), ("int8-g128", 8.25), ("int4", 5), ("int4-g128", 4.125), ("fp8", 8)],
)
def test_bits_of_a_weight(scheme, bits):
    assert bits_per_weight(scheme, "bfloat16") == bits
    config = public_config("llama-3-8b")
    leaves = [leaf for leaf in uniform_leaves(config, scheme=scheme) if leaf.spec.num_in_axes]
    real = 8 * sum(x.num_bytes for x in leaves) / sum(x.num_values for x in leaves)
    # A scale per column, where there are no groups, is what is left out.
    assert real == pytest.approx(bits, rel=2e-3)


def test_scheme_leaves_norms_and_routers_wide(tiny):
    leaves = uniform_leaves(read_model_config(tiny / "qwen3_moe"), scheme="int4")
    wide = {leaf.name for leaf in leaves if leaf.form is None}
    assert {"final_norm.weight", "layer.ffn.router"} < wide
    assert "layer.ffn.w_in" not in wide
