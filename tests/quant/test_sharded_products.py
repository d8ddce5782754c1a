"""Single products with packed weights on a mesh: every kind of cut equals one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from meshes import collectives, mesh_of

from inferjax.errors import UnsupportedConfig
from inferjax.quant.leaf import PackedLeaf, Split, as_matrix, widen
from inferjax.quant.linear import linear, lookup
from inferjax.quant.schemes import SCHEMES, round_to_nearest
from inferjax.quant.split import lay_out, may_cut, specs_of
from inferjax.sharding import Rules, cut_axes
from tests.kernels import native_library

MESH = mesh_of(2, 4)
# The weight's shape, axes contracted, axes stacked, the axis that "model" cuts; x's shape; einsum.
KINDS = {
    "columns": ((64, 8, 16), 1, 0, 1, (2, 3, 64), "BTD,DKH->BTKH"),
    "gate and up": ((64, 2, 64), 1, 0, 2, (2, 3, 64), "BTD,DCF->BTCF"),
    "rows": ((8, 16, 48), 2, 0, 0, (2, 3, 8, 16), "BTKH,KHD->BTD"),
    "heads": ((4, 32, 16), 1, 1, 0, (2, 3, 4, 32), "BTNH,NHR->BTNR"),
    "vocabulary": ((128, 64), -1, 0, 0, (2, 3, 64), "BTD,VD->BTV"),
    "width of an embedding": ((16, 128), -1, 0, 1, (2, 3, 128), "BTD,VD->BTV"),
}


def make_leaf(kind: str, scheme: str = "int4") -> PackedLeaf:
    shape, num_in, num_stacked, *_ = KINDS[kind]
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    matrix = round_to_nearest(as_matrix(weight, num_in, num_stacked), SCHEMES[scheme])
    return PackedLeaf(
        matrix=jax.tree.map(jnp.asarray, matrix),
        shape=shape,
        num_in_axes=num_in,
        num_batch_axes=num_stacked,
        activations=SCHEMES[scheme].activations,
    )


def split_of(kind: str, rows: tuple[str, ...] = ("data",)) -> Split:
    shape, axis = KINDS[kind][0], KINDS[kind][3]
    return Split(axes=tuple("model" if i == axis else None for i in range(len(shape))), rows=rows)


def put(leaf: PackedLeaf, split: Split) -> PackedLeaf:
    laid = lay_out(leaf, split)
    return jax.device_put(laid, jax.tree.map(lambda s: NamedSharding(MESH, s), specs_of(laid)))


def make_x(kind: str) -> jax.Array:
    shape = KINDS[kind][4]
    return jnp.asarray(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


@functools.cache
def runs(spec: str):
    return jax.jit(lambda x, leaf: linear(x, leaf, spec))


@pytest.mark.parametrize("scheme", ["int4", "int8", "int8-w8a8", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_product_equals_one_device_and_exchanges_sums_only(kind, scheme):
    native_library.require()
    leaf, x, spec = make_leaf(kind, scheme), make_x(kind), KINDS[kind][5]
    axis = KINDS[kind][3]
    if not may_cut(leaf, axis, 4):
        assert scheme == "int8-w8a8"  # whose rows are rounded 256 at a time
        assert kind in ("rows", "width of an embedding")
        return
    placed, run = put(leaf, split_of(kind)), runs(spec)
    compiled = run.lower(x, placed).compile()
    text = compiled.as_text()
    assert "PkQuantMatmul" in text or "PkGroupedMatmul" in text
    is_summed = kind in ("rows", "width of an embedding")
    assert [name for name, _ in collectives(text)] == ["all-reduce"] * is_summed
    got, want = np.asarray(compiled(x, placed)), np.asarray(run(x, leaf))
    if is_summed:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    else:
        np.testing.assert_array_equal(got, want)


def test_values_are_cut_where_they_lie_and_stay_the_same_weight():
    for kind in KINDS:
        leaf = make_leaf(kind)
        placed = put(leaf, split_of(kind))
        values = placed.matrix.values
        assert values.addressable_shards[0].data.size * 4 == values.size
        fetched, leaf = jax.device_get((placed, leaf))
        np.testing.assert_array_equal(widen(fetched), widen(leaf))
        back = lay_out(fetched, None)
        assert jax.tree.structure(back) == jax.tree.structure(leaf)
        jax.tree.map(np.testing.assert_array_equal, back, leaf)


def test_a_split_leaf_outside_of_a_mesh_is_the_plain_product():
    for kind in ("gate and up", "rows"):
        leaf, x = make_leaf(kind), make_x(kind)
        laid = lay_out(leaf, split_of(kind))
        want = linear(x, leaf, KINDS[kind][5])
        np.testing.assert_array_equal(linear(x, laid, KINDS[kind][5]), want)


@pytest.mark.parametrize("kind", ["gate and up", "rows"])
def test_a_weight_that_lies_elsewhere_than_it_says_is_still_the_same(kind):
    leaf, x, run = make_leaf(kind), make_x(kind), runs(KINDS[kind][5])
    laid = lay_out(leaf, split_of(kind))
    whole = jax.device_put(laid, NamedSharding(MESH, PartitionSpec()))
    np.testing.assert_allclose(run(x, whole), run(x, leaf), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["vocabulary", "width of an embedding"])
def test_a_lookup_sums_what_each_device_holds(kind):
    table = make_leaf(kind)
    ids = jnp.array([[0, 15, 7], [3, 200, -4]], jnp.int32)
    run = jax.jit(lookup)
    placed = put(table, split_of(kind))
    text = run.lower(placed, ids).compile().as_text()
    assert [name for name, _ in collectives(text)] == ["all-reduce"] * (kind == "vocabulary")
    np.testing.assert_array_equal(run(placed, ids), run(table, ids))


def test_rows_of_another_order_pick_their_inputs_from_all():
    order = np.random.default_rng(2).permutation(128).astype(np.int32)
    leaf = dataclasses.replace(make_leaf("rows"), permutation=jnp.asarray(order))
    x, run = make_x("rows"), runs(KINDS["rows"][5])
    want = run(x, leaf)
    np.testing.assert_allclose(run(x, put(leaf, split_of("rows"))), want, rtol=1e-5, atol=1e-4)


def test_an_embedding_in_another_order_of_rows_is_not_cut_along_them():
    """A lookup brings a row's values into the order of the inputs, and needs all of them for it."""
    order = np.random.default_rng(2).permutation(128).astype(np.int32)
    table = make_leaf("width of an embedding")
    assert may_cut(table, 1, 4)
    table = dataclasses.replace(table, permutation=jnp.asarray(order))
    assert not may_cut(table, 1, 4)
    assert may_cut(dataclasses.replace(make_leaf("vocabulary"), permutation=order[:64]), 0, 4)
    ids, names = jnp.array([0, 15, 7], jnp.int32), ("vocab", "model")
    rules = Rules(axes=(("model", "model"),))
    axes = cut_axes(rules, names, table.shape, dict(MESH.shape), lambda a, n: may_cut(table, a, n))
    placed = put(table, Split(axes=axes, rows=("data",)))
    run = jax.jit(lookup)
    np.testing.assert_array_equal(run(placed, ids), run(table, ids))
    x, spec = make_x("width of an embedding"), "BTD,VD->BTV"
    np.testing.assert_array_equal(runs(spec)(x, placed), runs(spec)(x, table))


@pytest.mark.parametrize("kind", ["gate and up", "rows", "heads"])
def test_gradients_and_vmap_pass_through(kind):
    leaf, x, spec = make_leaf(kind), make_x(kind), KINDS[kind][5]
    placed = put(leaf, split_of(kind))

    def loss(x, leaf):
        return jnp.sum(jnp.sin(linear(x, leaf, spec)))

    gradient = jax.jit(jax.grad(loss))
    np.testing.assert_allclose(gradient(x, placed), gradient(x, leaf), rtol=1e-4, atol=1e-4)
    stacked = jnp.stack([x, 2 * x, -x])
    mapped = jax.jit(jax.vmap(lambda x, leaf: linear(x, leaf, spec), (0, None)))
    want = jnp.stack([runs(spec)(one, leaf) for one in stacked])
    np.testing.assert_allclose(mapped(stacked, placed), want, rtol=1e-5, atol=1e-4)


def test_rows_that_do_not_divide_are_whole_on_every_device():
    leaf, x = make_leaf("columns"), make_x("columns")[:1]
    run = runs(KINDS["columns"][5])
    np.testing.assert_array_equal(run(x, put(leaf, split_of("columns"))), run(x, leaf))


def test_cuts_keep_to_blocks_words_groups_and_chunks():
    def leaf_of(shape, num_in, scheme):
        matrix = round_to_nearest(np.ones((shape[0], int(np.prod(shape[1:]))), np.float32), scheme)
        return PackedLeaf(
            matrix=matrix, shape=shape, num_in_axes=num_in, activations=scheme.activations
        )

    def fits(shape, axis, size, name, num_in=1):
        return may_cut(leaf_of(shape, num_in, SCHEMES[name]), axis, size)

    assert fits((64, 64), 1, 4, "int8")
    assert not fits((64, 64), 1, 8, "int8")  # eight columns each
    assert not fits((64, 60), 1, 4, "int8")  # fifteen
    assert not fits((64, 64), 1, 3, "int8")
    assert fits((64, 2, 64), 2, 4, "int8")
    assert not fits((64, 2, 32), 2, 4, "int8")  # eight of each
    assert fits((64, 4, 2, 8), 1, 4, "int8")  # heads of 16 columns
    assert fits((64, 16), 0, 16, "int8")  # one word
    assert not fits((64, 16), 0, 32, "int8")
    assert not fits((40, 16), 0, 4, "int8")  # ten rows are no words of four
    assert fits((64, 16), 0, 2, "int4")
    assert not fits((64, 16), 0, 4, "int4")  # half a group of 32
    assert fits((1024, 16), 0, 4, "int8-w8a8")
    assert not fits((512, 16), 0, 4, "int8-w8a8")  # half a chunk of 256
    assert fits((4, 16), 0, 4, "float32")


def test_rules_cut_the_first_axis_that_divides_once():
    sizes = {"data": 2, "model": 4}
    names, shape = ("experts", "model", None, "ffn"), (8, 64, 2, 128)
    assert cut_axes(Rules(), names, shape, sizes) == ("model", None, None, None)
    assert cut_axes(Rules(), names, (6, 64, 2, 128), sizes) == (None, None, None, "model")
    assert cut_axes(Rules(), names, shape, {"model": 1}) == (None,) * 4
    assert cut_axes(Rules(), names, shape, {"rows": 4}) == (None,) * 4
    both = Rules(axes=(("experts", "expert"), ("ffn", "model")))
    assert cut_axes(both, names, shape, {"expert": 2, "model": 4}) == (
        "expert",
        None,
        None,
        "model",
    )
    refused = cut_axes(Rules(), names, shape, sizes, lambda axis, size: axis != 0)
    assert refused == (None, None, None, "model")
    with pytest.raises(UnsupportedConfig, match="'data' cuts rows and weights"):
        Rules(axes=(("model", "data"),))
