"""What a chip holds of weights, by hand."""

import pytest

from inferjax.errors import ShardingError
from inferjax.planner import Mesh, make_model, public_config
from inferjax.planner.mesh import HeadShare, check_mesh, head_share, meshes, notes, shard_shape
from inferjax.planner.work import weight_size


def shapes(name, mesh):
    model = make_model(public_config(name))
    return {leaf.name: shard_shape(leaf, mesh) for leaf in model.leaves}


def test_tensor_parallel_chips_share_heads_width_and_vocabulary():
    found = shapes("llama-3-70b", Mesh(tp=8))
    assert found["embed"] == found["head"] == (128_256 // 8, 8192)
    assert found["layer.attention.wqkv"] == (8192, 1, 10, 128)
    assert found["layer.attention.wo"] == (1, 8, 128, 8192)
    assert found["layer.ffn.w_in"] == (8192, 2, 28_672 // 8)
    assert found["layer.ffn.w_down"] == (28_672 // 8, 8192)
    assert found["final_norm.weight"] == (8192,)


def test_key_value_heads_are_repeated_where_chips_outnumber_them():
    found = shapes("llama-3-70b", Mesh(tp=16))
    # Half of a group's 8 queries, with the group's key and value.
    assert found["layer.attention.wqkv"] == (8192, 1, 4 + 2, 128)
    assert found["layer.attention.wo"] == (1, 4, 128, 8192)
    share = head_share(public_config("llama-3-70b").layers[0].attention, 16)
    assert share == HeadShare(num_q_heads=4, num_kv_heads=1, copies=2)
    said = notes(public_config("llama-3-70b"), Mesh(tp=16))
    assert said == ("8 key/value heads on 16 chips: each is held 2 times, with its cache",)


def test_attention_that_does_not_divide_is_whole_on_every_chip():
    config = public_config("smollm2-135m")  # 9 query heads on 3
    assert head_share(config.layers[0].attention, 2).whole
    found = shapes("smollm2-135m", Mesh(tp=2))
    assert found["layer.attention.wqkv"] == (576, 3, 5, 64)
    assert found["layer.ffn.w_down"] == (768, 576)
    assert "2 does not divide 9 query heads on 3 key/value heads" in notes(config, Mesh(tp=2))[0]
    assert notes(config, Mesh(dp=2)) == ()


def test_width_and_vocabulary_that_do_not_divide_are_said():
    said = notes(public_config("smollm2-135m"), Mesh(tp=5))
    assert any("feed-forward width of 1536" in note for note in said)
    assert any("49152 vocabulary entries" in note for note in said)


def test_experts_are_divided_over_their_axis_and_their_width_over_tp():
    found = shapes("deepseek-v3", Mesh(tp=2, ep=8))
    assert found["layer.ffn.w_in"] == (32, 7168, 2, 1024)
    assert found["layer.ffn.shared.w_in"] == (7168, 2, 1024)
    assert found["layer.ffn.router"] == (7168, 256)
    assert found["layer.attention.wk_b"] == (64, 128, 512)
    assert found["layer.attention.wkv_a"] == (7168, 576)


def test_shares_add_up_to_the_weights():
    model = make_model(public_config("llama-3-70b"))
    shared = weight_size(model, Mesh(tp=8))
    norms = (2 * 80 + 1) * 8192 * 2  # every chip has all of them
    assert 8 * (shared - norms) == model.weight_bytes - norms
    assert weight_size(model, Mesh(dp=8)) == model.weight_bytes


def test_packed_shares_hold_whole_blocks():
    model = make_model(public_config("llama-3-70b"), quantize="int4-g128")
    assert weight_size(model, Mesh(tp=8)) == pytest.approx(model.weight_bytes / 8, rel=1e-3)


def test_meshes_use_all_chips_and_divide_experts():
    dense = set(meshes(public_config("llama-3-8b"), 8))
    assert dense == {Mesh(tp=tp, dp=8 // tp) for tp in (1, 2, 4, 8)}
    sparse = set(meshes(public_config("mixtral-8x7b"), 16))
    assert Mesh(tp=2, ep=8) in sparse
    assert Mesh(ep=16) not in sparse
    assert all(mesh.num_chips == 16 for mesh in sparse)


@pytest.mark.parametrize(
    ("name", "mesh", "text"),
    [
        ("llama-3-8b", Mesh(tp=4), "no mesh of 8 chips"),
        ("llama-3-8b", Mesh(tp=0, dp=8), "no mesh of 8 chips"),
        ("llama-3-8b", Mesh(ep=8), "share no experts"),
        ("qwen3-30b-a3b", Mesh(ep=8), None),
        ("gpt-oss-20b", Mesh(tp=2, ep=4), None),
    ],
)
def test_mesh_that_is_none_is_refused(name, mesh, text):
    config = public_config(name)
    if text is None:
        check_mesh(config, mesh, 8)
        return
    with pytest.raises(ShardingError, match=text):
        check_mesh(config, mesh, 8)


def test_mesh_reads_as_its_longer_axes():
    assert str(Mesh(tp=4, dp=2)) == "dp 2 x tp 4"
    assert str(Mesh()) == "one chip"
