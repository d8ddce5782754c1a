"""Statistics of what enters a product: from a layer's own forward pass, experts' rows included."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from one_layer import one_layer, products_of
from tolerances import MATMUL_F32

from inferjax.calibrate.products import at, collect, layer_output, product_paths, put
from inferjax.layers.mlp import mlp
from inferjax.layers.moe import route
from inferjax.layers.norm import normalize
from inferjax.quant.linear import linear
from inferjax.quant.watched import Watched, no_statistics, statistics_of


def residuals(config, rng):
    return [jnp.asarray(rng.normal(size=(1, 12, config.model_dim)), jnp.float32) for _ in range(2)]


def assert_statistics(seen, rows):
    wanted = statistics_of(jnp.asarray(rows))
    scale = float(jnp.abs(wanted.gram).max())
    assert_allclose(seen.gram, wanted.gram, rtol=0, atol=MATMUL_F32["atol"] * scale)
    assert_allclose(seen.magnitude, wanted.magnitude, rtol=1e-4, atol=1e-4)
    assert_array_equal(seen.num_rows, wanted.num_rows)


def test_inputs_of_the_first_product_are_the_normalized_residuals(rng):
    params, config = one_layer("llama")
    layer, spec, path = params.layers[0], config.layers[0], ("attention", "wqkv")
    hidden = residuals(config, rng)
    seen = collect(layer, spec, hidden, path, at(products_of(config), path))
    rows = [normalize(x, layer.attention_in, spec.norm)[0] for x in hidden]
    assert_statistics(seen, jnp.concatenate(rows))


def test_experts_count_the_rows_that_are_routed_to_them(rng):
    params, config = one_layer("gpt_oss")
    layer, spec, products = params.layers[0], config.layers[0], products_of(config)
    x = residuals(config, rng)[:1]
    path = ("ffn", "w_in")
    seen = collect(layer, spec, x, path, at(products, path))
    # Experts that add nothing leave what attention made, which their norm and router read.
    silent = put(layer, ("ffn", "w_down"), layer.ffn.w_down * 0)
    silent = put(silent, ("ffn", "b_down"), layer.ffn.b_down * 0)
    attended = layer_output(silent, x[0], spec)
    rows = normalize(attended, layer.ffn_in, spec.norm)[0]
    experts = np.asarray(route(rows, layer.ffn, spec.ffn.router)[1])
    for expert in range(spec.ffn.router.num_experts):
        mine = np.asarray(rows)[(experts == expert).any(axis=1)]
        assert_statistics(jax.tree.map(lambda s, e=expert: s[e], seen), mine)


def test_heads_have_statistics_of_their_own(rng):
    weight = jnp.asarray(rng.normal(size=(3, 8, 5)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 7, 3, 8)), jnp.float32)

    def total(seat):
        leaf = Watched(weight=weight, seat=seat, num_in_axes=1, num_batch_axes=1)
        return linear(x, leaf, "BTNH,NHR->BTNR").sum()

    seen = jax.jit(jax.grad(total))(no_statistics(weight.shape, 1, 1))
    for head in range(3):
        rows = x[:, :, head].reshape(-1, 8)
        assert_statistics(jax.tree.map(lambda s, h=head: s[h], seen), rows)


def test_watching_changes_neither_the_product_nor_its_gradient(rng):
    params, config = one_layer("llama")
    w, spec = params.layers[0].ffn, config.layers[0].ffn
    x = jnp.asarray(rng.normal(size=(1, 5, config.model_dim)), jnp.float32)
    seat = no_statistics(w.w_in.shape, 1, 0)
    watching = w.replace(w_in=Watched(weight=w.w_in, seat=seat, num_in_axes=1))
    assert_array_equal(mlp(x, watching, spec), mlp(x, w, spec))
    slopes = [jax.grad(lambda x, w=w: mlp(x, w, spec).sum())(x) for w in (watching, w)]
    assert_allclose(*slopes, **MATMUL_F32)


def test_products_come_in_the_order_in_which_they_run():
    assert product_paths(products_of(one_layer("llama")[1])) == (
        ("attention", "wqkv"),
        ("attention", "wo"),
        ("ffn", "w_in"),
        ("ffn", "w_down"),
    )
    found = product_paths(products_of(one_layer("deepseek_v3")[1]))
    assert [path[-1] for path in found if path[0] == "attention"] == [
        "wq_a",
        "wq",
        "wkv_a",
        "wk_b",
        "wv_b",
        "wo",
    ]
    assert ("ffn", "shared", "w_down") in found
