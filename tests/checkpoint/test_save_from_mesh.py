"""What lies on a mesh is saved as one device has it, and restored onto any other mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from meshes import mesh_of
from rewrite_gguf import Kind, rewrite
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.errors import ShardingError
from inferjax.models.placed import place
from inferjax.quant.leaf import is_packed

TOKENS = np.array([[3, 5, 7, 11]], np.int32)


def packed(folder: str, scheme: str) -> ij.Model:
    model = tiny_model(folder)
    return dataclasses.replace(model, params=ij.quantize(model.params, model.config, scheme))


def of_blocks(tmp_path) -> ij.Model:
    """Return a model of GGUF blocks, whose scales are float16."""
    source = TINY.parent / "tiny_gguf" / "llama.gguf"
    parts = ("attn_q", "attn_k", "attn_v", "ffn_up", "ffn_gate", "token_embd")
    path = rewrite(
        source,
        tmp_path / "m.gguf",
        lambda name, _: Kind.Q4_0 if any(part in name for part in parts) else None,
    )
    return ij.load(path)


MODELS = {
    "int8": lambda _: packed("llama", "int8"),
    "int4 with minimums": lambda _: packed("llama", "int4"),
    "experts": lambda _: packed("qwen3_moe", "int8"),
    "blocks": of_blocks,
    "act-order": lambda _: ij.load(TINY.parent / "tiny_quantized" / "gptq_act_order"),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, AxisType.Auto) for name in MODELS), ("int8", AxisType.Explicit)],
)
def test_what_lay_on_a_mesh_is_loaded_on_one_device(name, kind, tmp_path):
    model = MODELS[name](tmp_path)
    placed = place(model.params, model.config, mesh_of(4, 2, kind))
    leaves = [leaf for leaf in jax.tree.leaves(placed, is_leaf=is_packed) if is_packed(leaf)]
    assert any(any(leaf.split.axes) for leaf in leaves if leaf.split is not None)
    path = ij.save(dataclasses.replace(model, params=placed), tmp_path / "saved")
    again = ij.load(path)
    assert jax.tree.structure(again.params) == jax.tree.structure(model.params)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(again.params))
    got, want = (ij.forward(m.params, m.config, TOKENS) for m in (again, model))
    np.testing.assert_array_equal(got, want)


def test_arrays_that_lay_on_a_mesh_are_loaded_on_one_device(tmp_path):
    model = tiny_model("llama")
    placed = place(model.params, model.config, mesh_of(1, 8))
    path = ij.save(dataclasses.replace(model, params=placed), tmp_path / "saved")
    again = ij.load(path)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(again.params))


@pytest.mark.parametrize("name", ["arrays", *MODELS])
def test_what_lay_on_a_mesh_is_restored_onto_another(name, tmp_path):
    model = tiny_model("llama") if name == "arrays" else MODELS[name](tmp_path)
    placed = place(model.params, model.config, mesh_of(4, 2))
    path = ij.save(dataclasses.replace(model, params=placed), tmp_path / "saved")
    mesh = mesh_of(2, 4)
    assert_placed(ij.load(path, mesh=mesh).params, place(model.params, model.config, mesh))


@pytest.mark.parametrize(("stored", "scheme"), [("int8", "none"), ("int8", "int4"), (None, "int4")])
def test_the_form_may_change_on_the_way_to_a_mesh(stored, scheme, tmp_path):
    model = packed("llama", stored) if stored else tiny_model("llama")
    path, mesh = ij.save(model, tmp_path / "saved"), mesh_of(2, 4)
    want = ij.load(path, quantize=scheme).params
    got = ij.load(path, quantize=scheme, mesh=mesh).params
    assert_placed(got, place(want, model.config, mesh))


def test_no_device_is_given_more_than_its_part(tmp_path, monkeypatch):
    path = ij.save(packed("llama", "int8"), tmp_path / "saved")
    given, put = [], jax.device_put

    def watched(values, *args, **how):
        given.append(values.nbytes)
        return put(values, *args, **how)

    monkeypatch.setattr(jax, "device_put", watched)
    for quantize in ("native", "none"):
        params = ij.load(path, quantize=quantize, mesh=mesh_of(4, 2)).params
        parts = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params)]
        assert max(given, default=0) <= max(parts)


def test_a_saved_model_that_a_mesh_does_not_divide_is_refused(tmp_path):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    mesh = jax.make_mesh((3,), ("model",), devices=jax.devices()[:3])
    with pytest.raises(ShardingError, match="divides no weight of llama"):
        ij.load(path, mesh=mesh)


def assert_placed(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.sharding == theirs.sharding
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
