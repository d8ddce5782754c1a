"""The same numbers with params sharded by the caller, on Auto and on Explicit meshes."""

import functools
from typing import Any

import composable_models as models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tolerances import CHUNKED_GRADIENTS_F32, LOGITS_F32, LOGPROBS_F32

import inferjax as ij
from inferjax.models.params import ArraySpec, param_spec

PARAMS, CONFIG = models.cut_model("llama")
TOKENS = models.random_tokens(CONFIG, 8, 5)
AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
AUTO_IS_SLOW = [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit]


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def fsdp(params: Any, mesh: Mesh) -> Any:
    """Shard each weight's largest axis that 8 divides."""

    def put(x: jax.Array) -> jax.Array:
        axes = sorted(range(x.ndim), key=lambda axis: -x.shape[axis])
        axis = next((a for a in axes if x.shape[a] % 8 == 0), None)
        spec = [None if a != axis else "data" for a in range(x.ndim)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, params)


def tensor_parallel(params: Any, config: Any, mesh: Mesh) -> Any:
    """Shard heads, ffn and vocabulary by the weights' logical axes, where they divide."""
    size = mesh.shape["model"]

    def put(spec: ArraySpec, x: jax.Array) -> jax.Array:
        names = ("kv_heads", "heads", "ffn", "vocab", "experts")
        wanted = [
            "model" if name in names and count % size == 0 else None
            for name, count in zip(spec.axes, spec.shape, strict=True)
        ]
        for axis in range(len(wanted)):  # a mesh axis shards one axis of an array
            if wanted[axis] in wanted[:axis]:
                wanted[axis] = None
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*wanted)))

    specs = param_spec(config)
    return jax.tree.map(put, specs, params, is_leaf=lambda x: isinstance(x, ArraySpec))


def spread(array: Any, mesh: Mesh) -> jax.Array:
    return jax.device_put(jnp.asarray(array), NamedSharding(mesh, PartitionSpec("data")))


@functools.partial(jax.jit, static_argnames="config")
def draw(params: Any, tokens: Any, key: Any, config: Any = CONFIG) -> ij.Generation:
    sampling = ij.make_sampling(8, temperature=0.8)
    return ij.generate(params, config, tokens, key=key, max_new_tokens=4, sampling=sampling)


@jax.jit
def scored(params: Any, tokens: Any) -> tuple[jax.Array, jax.Array, Any]:
    def loss(p: Any) -> tuple[jax.Array, jax.Array]:
        values = ij.score(p, CONFIG, tokens)
        return values.mean(), values

    (_, values), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return ij.forward(params, CONFIG, tokens), values, gradient


@functools.cache
def alone() -> tuple[Any, Any]:
    return draw(PARAMS, TOKENS, jax.random.key(0)), scored(PARAMS, TOKENS)


@pytest.mark.parametrize("kind", AUTO_IS_SLOW)
def test_fsdp_generation_equals_one_device(kind: AxisType):
    mesh = mesh_of((8,), ("data",), kind)
    drawn = draw(fsdp(PARAMS, mesh), spread(TOKENS, mesh), jax.random.key(0))
    check_generation(drawn, alone()[0])
    assert drawn.tokens.sharding.is_equivalent_to(spread(TOKENS, mesh).sharding, 2)
    # What comes out is of the caller's kind, ready for its next operation.
    assert not jax.jit(lambda x: x + 1)(drawn.tokens).is_deleted()
    if kind == AxisType.Explicit:
        assert jax.typeof(drawn.tokens).sharding.spec == PartitionSpec("data", None)
        assert jax.typeof(drawn.lengths).sharding.spec == PartitionSpec("data")


@pytest.mark.parametrize("kind", AUTO_IS_SLOW)
def test_fsdp_scores_logits_and_gradients_equal_one_device(kind: AxisType):
    mesh = mesh_of((8,), ("data",), kind)
    params = fsdp(PARAMS, mesh)
    logits, values, gradient = scored(params, spread(TOKENS, mesh))
    want_logits, want_values, want_gradient = alone()[1]
    np.testing.assert_allclose(logits, want_logits, **LOGITS_F32)
    np.testing.assert_allclose(values, want_values, **LOGPROBS_F32)
    for got, want in zip(jax.tree.leaves(gradient), jax.tree.leaves(want_gradient), strict=True):
        scale = float(jnp.max(jnp.abs(want)))
        np.testing.assert_allclose(
            np.asarray(got) / scale, np.asarray(want) / scale, **CHUNKED_GRADIENTS_F32
        )
    if kind == AxisType.Explicit:
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (params, gradient))
        assert specs[0] == specs[1]


@pytest.mark.parametrize("kv_dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", AUTO_IS_SLOW)
def test_steps_keep_the_caches_sharding(kind: AxisType, kv_dtype: str):
    """Prefill and decode over a cache whose heads are sharded, called without a jit around."""
    mesh = mesh_of((4, 2), ("data", "model"), kind)
    params = tensor_parallel(PARAMS, CONFIG, mesh)
    exec = ij.Exec(page_size=8)
    heads = NamedSharding(mesh, PartitionSpec(None, None, "model"))

    def run(params: Any, tokens: Any, place: Any) -> Any:
        cache = place(ij.init_cache(CONFIG, num_pages=9, exec=exec, dtype=kv_dtype))
        inputs = ij.make_inputs(tokens, block_tables=[1 + np.arange(8)[:, None]])
        return ij.extend(params, CONFIG, cache, inputs, exec=exec)

    out, cache = run(params, spread(TOKENS, mesh), lambda c: jax.device_put(c, heads))
    expected, whole = run(PARAMS, TOKENS, lambda c: c)
    values, known = (x.groups[0].values[:, 1:].astype(jnp.float32) for x in (cache, whole))
    if kv_dtype == "float32":
        np.testing.assert_allclose(out.values, expected.values, **LOGITS_F32)
        np.testing.assert_allclose(values, known, rtol=0, atol=1e-5)
    else:  # the last bits of a sum may choose the next code
        np.testing.assert_allclose(values, known, rtol=0, atol=1)
        assert (values == known).mean() > 0.99
    if kind == AxisType.Explicit:
        for leaf in jax.tree.leaves(cache):
            assert leaf.sharding.is_equivalent_to(heads, leaf.ndim)
        assert jax.typeof(out.values).sharding.spec == PartitionSpec("data", None)


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_tensor_parallel_generation_equals_one_device(family: str, kind: AxisType):
    params, config = models.cut_model(family, 2)
    tokens = models.random_tokens(config, 8, 5)
    mesh = mesh_of((4, 2), ("data", "model"), kind)
    drawn = draw(
        tensor_parallel(params, config, mesh), spread(tokens, mesh), jax.random.key(0), config
    )
    check_generation(drawn, draw(params, tokens, jax.random.key(0), config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", AXIS_TYPES)
def test_generation_in_a_mesh_context_equals_one_device(kind: AxisType):
    """With `jax.set_mesh`, tokens replicated, no jit around, keys mapped."""
    mesh = mesh_of((8,), ("data",), kind)
    params = fsdp(PARAMS, mesh)
    with jax.set_mesh(mesh):
        drawn = ij.generate(params, CONFIG, TOKENS, max_new_tokens=4)
        sampling = ij.make_sampling(8, temperature=0.8)
        keys = jax.random.split(jax.random.key(0), 2)
        over_keys = jax.vmap(
            lambda key: ij.generate(
                params, CONFIG, TOKENS, key=key, max_new_tokens=4, sampling=sampling
            )
        )
        mapped = jax.jit(over_keys)(keys)
    check_generation(drawn, ij.generate(PARAMS, CONFIG, TOKENS, max_new_tokens=4))
    check_generation(models.take(jax.device_get(mapped), 0), draw(PARAMS, TOKENS, keys[0]))


def check_generation(got: ij.Generation, want: ij.Generation) -> None:
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.lengths, want.lengths)
    np.testing.assert_array_equal(got.status, 0)
    np.testing.assert_allclose(got.logprobs, want.logprobs, **LOGPROBS_F32)
    np.testing.assert_allclose(got.sampled_logprobs, want.sampled_logprobs, **LOGPROBS_F32)
