"""Every family's sources form the tree of `param_spec`, and build leaves of its shapes."""

import importlib
import json
import pkgutil

import jax
import numpy as np
import pytest
from tiny_models import FAMILIES as FOLDERS

import inferjax.models
from inferjax.config import Attention
from inferjax.models.family import read_config
from inferjax.models.params import ArraySpec, param_spec
from inferjax.models.registry import FAMILIES, family_for
from inferjax.models.sources import Source, fuse_qkv, stack_transposed

VARIANTS = [
    *((name, {}) for name in FOLDERS),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 6}),
    ("llama", {"num_key_value_heads": 4}),
    ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    ("gpt_oss", {"attention_bias": False, "tie_word_embeddings": True}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"attention_bias": True, "first_k_dense_replace": 0, "n_shared_experts": 2}),
    ("gpt2", {"tie_word_embeddings": False, "n_inner": 100}),
    ("cohere", {"attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": False}),
    ("stablelm", {"qk_layernorm": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("opt", {"enable_bias": False, "word_embed_proj_dim": 16, "tie_word_embeddings": False}),
    ("opt", {"layer_norm_elementwise_affine": False}),
    ("opt", {"do_layer_norm_before": False, "layer_norm_elementwise_affine": False}),
    ("opt", {"_remove_final_layer_norm": True}),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("gemma2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("phi3", {"num_key_value_heads": 1, "head_dim": 10, "tie_word_embeddings": True}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 4, "head_dim": 10}),
    ("olmo3", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True}),
    ("glm4", {"attention_bias": True, "partial_rotary_factor": 0.25, "num_key_value_heads": 1}),
    ("mistral", {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("mixtral", {"head_dim": 10, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": False}),
    ("qwen2_moe", {"qkv_bias": False, "mlp_only_layers": [], "tie_word_embeddings": True}),
    ("qwen3_moe", {"attention_bias": True, "decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    ("deepseek_v2", {"attention_bias": True, "mlp_bias": True, "n_shared_experts": 1}),
    ("deepseek_v2", {"q_lora_rank": None, "moe_layer_freq": 2, "tie_word_embeddings": True}),
]

# Split over two leaves; the rows of OPT's table that only padding used are left behind.
TAKEN_IN_PART = ("kv_b_proj", "decoder.embed_positions")


def read(tiny, name, change):
    raw = json.loads((tiny / name / "config.json").read_text()) | change
    family = family_for(raw["model_type"])
    return family, read_config(family, raw)


@pytest.mark.parametrize(("name", "change"), VARIANTS)
def test_sources_build_the_specified_tree(tiny, name, change):
    family, config = read(tiny, name, change)
    specs, treedef = jax.tree.flatten(
        param_spec(config), is_leaf=lambda node: isinstance(node, ArraySpec)
    )
    sources, tree = jax.tree.flatten(
        family.weights(config), is_leaf=lambda node: isinstance(node, Source)
    )
    assert tree == treedef
    for spec, source in zip(specs, sources, strict=True):
        parts = [np.zeros(tensor.shape, np.float32) for tensor in source.tensors]
        assert source.build(*parts).shape == spec.shape, source.tensors[0].name


@pytest.mark.parametrize(("name", "change"), VARIANTS)
def test_no_value_is_lost_or_doubled(tiny, name, change):
    family, config = read(tiny, name, change)
    sources = jax.tree.leaves(family.weights(config), is_leaf=lambda node: isinstance(node, Source))
    seen = {}
    for source in sources:
        sizes = [int(np.prod(tensor.shape)) for tensor in source.tensors]
        starts = np.cumsum([0, *sizes])
        parts = [
            np.arange(start, start + size).reshape(tensor.shape)
            for tensor, start, size in zip(source.tensors, starts, sizes, strict=False)
        ]
        values = np.sort(source.build(*parts), axis=None)
        assert len(np.unique(values)) == len(values)
        for tensor in source.tensors:
            seen[tensor] = seen.get(tensor, 0) + 1
            if not any(part in tensor.name for part in TAKEN_IN_PART):
                assert len(values) == starts[-1], tensor.name
    # Only kv_b_proj is split over two leaves.
    assert all(n == 1 + ("kv_b_proj" in tensor.name) for tensor, n in seen.items())


def test_fused_queries_stay_beside_their_key_and_value(rng):
    dim, kv_heads, group, width = 5, 2, 3, 4
    q = rng.normal(size=(kv_heads * group * width, dim))
    k, v = (rng.normal(size=(kv_heads * width, dim)) for _ in range(2))
    spec = Attention(num_q_heads=6, num_kv_heads=kv_heads, head_dim=width, scale=1.0)
    fused = fuse_qkv(q, k, v, spec)
    assert fused.shape == (dim, kv_heads, group + 2, width)
    for head in range(kv_heads):
        for g in range(group):
            start = (head * group + g) * width
            np.testing.assert_array_equal(fused[:, head, g], q[start : start + width].T)
        rows = slice(head * width, (head + 1) * width)
        np.testing.assert_array_equal(fused[:, head, group], k[rows].T)
        np.testing.assert_array_equal(fused[:, head, group + 1], v[rows].T)


def test_gate_and_up_are_stacked_in_order(rng):
    gate, up = rng.normal(size=(2, 7, 3))
    stacked = stack_transposed(gate, up)
    np.testing.assert_array_equal(stacked[:, 0], gate.T)
    np.testing.assert_array_equal(stacked[:, 1], up.T)


def test_gpt_oss_gate_and_up_alternate(tiny):
    family, config = read(tiny, "gpt_oss", {})
    source = family.weights(config).layers[0].ffn.w_in
    values = np.arange(4 * 64 * 128).reshape(4, 64, 128)
    built = source.build(values)
    np.testing.assert_array_equal(built[:, :, 0], values[:, :, 0::2])
    np.testing.assert_array_equal(built[:, :, 1], values[:, :, 1::2])


@pytest.mark.parametrize("interleaved", [True, False])
def test_deepseek_moves_only_interleaved_rotary_rows(tiny, interleaved):
    family, config = read(tiny, "deepseek_v3", {"rope_interleave": interleaved})
    attention = family.weights(config).layers[0].attention
    rows = np.repeat(np.arange(48)[:, None], 64, axis=1)
    rotary = list(range(32, 48))
    rotary = rotary[0::2] + rotary[1::2] if interleaved else rotary
    np.testing.assert_array_equal(attention.wkv_a.build(rows)[0], [*range(32), *rotary])
    heads = np.repeat(np.arange(128)[:, None], 32, axis=1)
    second = attention.wq.build(heads)[0, 1] - 32
    rotary = list(range(16, 32))
    rotary = rotary[0::2] + rotary[1::2] if interleaved else rotary
    np.testing.assert_array_equal(second, [*range(16), *rotary])


def test_every_family_file_is_in_the_table():
    names = [module.name for module in pkgutil.iter_modules(inferjax.models.__path__)]
    modules = [importlib.import_module(f"inferjax.models.{name}") for name in names]
    found = {module.FAMILY.name for module in modules if hasattr(module, "FAMILY")}
    assert found == {family.name for family in FAMILIES}
    assert len(FAMILIES) == len(found)
