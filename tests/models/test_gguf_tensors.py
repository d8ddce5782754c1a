"""Where Hugging Face's tensors are in GGUF files, and what makes them of what is stored."""

import numpy as np
import pytest
from gguf_metadata import LEAST, config

from inferjax.models.family import model_sources
from inferjax.models.gguf_format import Part
from inferjax.models.gguf_tensors import find_tensor
from inferjax.models.registry import family_named
from inferjax.models.sources import Source, Tensor

EXPERTS = {"expert_count": 4, "expert_used_count": 2}


def find(facts, name, shape, names=()):
    return find_tensor(family_named(facts.family).gguf, Tensor(name, shape), facts, names)


def one_part(*args):
    [part] = find(*args).parts
    return part


def leaves(tree):
    """Return every source of the weights of a model."""
    if isinstance(tree, Source):
        return [tree]
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    fields = getattr(type(tree), "__dataclass_fields__", {})
    return [leaf for field in fields for leaf in leaves(getattr(tree, field))]


@pytest.mark.parametrize("architecture", LEAST)
def test_every_tensor_has_a_place(architecture):
    names = ("blk.0.attn_q.bias", "output.weight") if architecture != "gpt2" else ()
    facts = config(architecture, names)
    sources = leaves(model_sources(family_named(facts.family), facts))
    tensors = [tensor for source in sources for tensor in source.tensors]
    assert len(tensors) > 20
    top = ("token_embd.", "output.", "output_norm.", "position_embd.", "blk.")
    for tensor in tensors:
        for part in find(facts, tensor.name, tensor.shape).parts:
            assert part.name.startswith(top), tensor
            assert not any(word in part.name for word in ("proj", "layers", "experts", "mlp"))


def test_llama_heads_have_their_pairs_side_by_side():
    facts = config("llama", **{"attention.head_count_kv": 2})
    stored = find(facts, "model.layers.1.self_attn.k_proj.weight", (32, 64))
    assert stored.parts == (Part("blk.1.attn_k.weight", (32, 64), (32, 64)),)
    rows = np.arange(32.0)[:, None] * np.ones(64)
    order = stored.build(rows)[:, 0]
    np.testing.assert_array_equal(order[:16], [*range(0, 16, 2), *range(1, 16, 2)])
    np.testing.assert_array_equal(order[16:] - 16, order[:16])
    assert find(facts, "model.layers.1.self_attn.v_proj.weight", (32, 64)).build is None


def test_no_other_architecture_moves_its_rows():
    moved = {"granite", "llama", "smollm3"}
    for architecture in sorted(set(LEAST) - {"gpt2", "gptneox", "phi3", "deepseek2"}):
        stored = find(config(architecture), "model.layers.0.self_attn.q_proj.weight", (64, 64))
        assert (stored.build is not None) == (architecture in moved)


def test_gemma_norms_lose_their_one():
    for architecture in ("gemma", "gemma2", "gemma3"):
        for name in ("model.norm.weight", "model.layers.0.post_attention_layernorm.weight"):
            build = find(config(architecture), name, (64,)).build
            np.testing.assert_array_equal(build(np.full(64, 1.5, np.float16)), np.full(64, 0.5))
    build = find(config("gemma3"), "model.layers.0.self_attn.q_norm.weight", (16,)).build
    np.testing.assert_array_equal(build(np.ones(16)), np.zeros(16))
    assert find(config("qwen3"), "model.layers.0.self_attn.q_norm.weight", (16,)).build is None


def test_gpt2_weights_are_stored_the_other_way_round():
    stored = find(config("gpt2"), "transformer.h.2.attn.c_attn.weight", (64, 192))
    assert stored.parts == (Part("blk.2.attn_qkv.weight", (192, 64), (192, 64)),)
    values = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(stored.build(values), values.T)
    [bias] = find(config("gpt2"), "transformer.h.2.attn.c_attn.bias", (192,)).parts
    assert bias.whole == (192,)
    assert one_part(config("gpt2"), "transformer.wpe.weight", (256, 64)).name == (
        "position_embd.weight"
    )


def test_gptneox_heads_come_first():
    name = "gpt_neox.layers.0.attention.query_key_value.bias"
    build = find(config("gptneox"), name, (192,)).build
    stored = np.arange(192)  # all queries, all keys, all values, of 4 heads of 16
    head = build(stored).reshape(4, 3, 16)
    np.testing.assert_array_equal(head[1, :, 0], [16, 64 + 16, 128 + 16])


def test_experts_are_found_in_every_layout():
    facts = config("llama", **EXPERTS)
    prefix = "model.layers.0.block_sparse_moe.experts.2"
    gate, down = f"{prefix}.w1.weight", f"{prefix}.w2.weight"
    stack = Part("blk.0.ffn_gate_exps.weight", (4, 112, 64), (112, 64), 2 * 112 * 64)
    assert one_part(facts, gate, (112, 64)) == stack
    assert one_part(facts, gate, (112, 64), ["blk.0.ffn_gate_exps.weight"]) == stack
    whole = one_part(facts, down, (64, 112))
    assert (whole.name, whole.whole) == ("blk.0.ffn_down_exps.weight", (4, 64, 112))
    alone = one_part(facts, gate, (112, 64), ["blk.0.ffn_gate.2.weight"])
    assert alone == Part("blk.0.ffn_gate.2.weight", (112, 64), (112, 64))
    fused = ["blk.0.ffn_gate_up_exps.weight"]
    both = ((4, 224, 64), (112, 64))
    assert one_part(facts, gate, (112, 64), fused) == Part(*fused, *both, 4 * 112 * 64)
    up = f"{prefix}.w3.weight"
    assert one_part(facts, up, (112, 64), fused) == Part(*fused, *both, 5 * 112 * 64)
    assert one_part(facts, down, (64, 112), fused).name == "blk.0.ffn_down_exps.weight"


def test_fused_projections_are_taken_apart():
    facts = config("qwen2", **{"attention.head_count_kv": 2})
    names = ["blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"]

    def part(which, rows, leaf="weight", width=(64,)):
        name = f"model.layers.0.self_attn.{which}_proj.{leaf}"
        return one_part(facts, name, (rows, *width), names)

    assert part("q", 64) == Part(names[0], (128, 64), (64, 64))
    assert part("k", 32) == Part(names[0], (128, 64), (32, 64), 64 * 64)
    assert part("v", 32) == Part(names[0], (128, 64), (32, 64), 96 * 64)
    assert part("v", 32, "bias", ()) == Part(names[1], (128,), (32,), 96)
    assert part("o", 64).name == "blk.0.attn_output.weight"


def test_fused_projections_of_llama_are_still_reordered():
    name = "model.layers.0.self_attn.k_proj.weight"
    stored = find(config("llama"), name, (64, 64), ["blk.0.attn_qkv.weight"])
    assert stored.parts[0].begin == 64 * 64
    assert stored.build(np.arange(64)[:, None])[1] == 2


def test_stablelm_norms_of_heads_are_stacked():
    facts = config("stablelm", ["blk.0.attn_q_norm.weight"], **{"attention.head_count_kv": 2})
    name = "model.layers.0.self_attn.{}_layernorm.norms.1.weight"
    assert one_part(facts, name.format("q"), (16,)) == Part(
        "blk.0.attn_q_norm.weight", (4, 16), (16,), 16
    )
    assert one_part(facts, name.format("k"), (16,)).whole == (2, 16)


def test_gpt_oss_experts_are_interleaved():
    facts = config("gpt-oss", **EXPERTS)
    stored = find(facts, "model.layers.0.mlp.experts.gate_up_proj", (4, 64, 96))
    names = ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight"]
    assert [part.name for part in stored.parts] == names
    assert {part.whole for part in stored.parts} == {(4, 48, 64)}
    gate = np.random.default_rng(0).normal(size=(4, 48, 64))
    built = stored.build(gate, -gate)
    assert built.shape == (4, 64, 96)
    np.testing.assert_array_equal(built[1, 5, 0::2], gate[1, :, 5])
    np.testing.assert_array_equal(built[1, 5, 1::2], -gate[1, :, 5])
    stored = find(facts, "model.layers.0.mlp.experts.gate_up_proj_bias", (4, 96))
    assert stored.build(np.ones((4, 48)), np.zeros((4, 48)))[3, :4].tolist() == [1, 0, 1, 0]
    stored = find(facts, "model.layers.0.mlp.experts.down_proj", (4, 48, 64))
    assert stored.parts[0].whole == (4, 64, 48)
    np.testing.assert_array_equal(stored.build(gate.swapaxes(1, 2)), gate)
    assert one_part(facts, "model.layers.0.self_attn.sinks", (4,)).name == (
        "blk.0.attn_sinks.weight"
    )


def test_deepseek_expansion_is_joined():
    facts = config("deepseek2")
    name, shape = "model.layers.0.self_attn.kv_b_proj.weight", (4 * 32, 32)
    stored = find(facts, name, shape)
    names = [("blk.0.attn_k_b.weight", (4, 32, 16)), ("blk.0.attn_v_b.weight", (4, 16, 32))]
    assert [(part.name, part.whole) for part in stored.parts] == names
    rows = np.random.default_rng(0).normal(size=(4, 32, 32))
    built = stored.build(rows[:, :16].swapaxes(1, 2), rows[:, 16:])
    np.testing.assert_array_equal(built, rows.reshape(shape))
    old = ["blk.0.attn_kv_b.weight"]
    assert one_part(facts, name, shape, old) == Part(*old, shape, shape)
