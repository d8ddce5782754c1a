"""The C++ implementation of paged attention inside jit, loops, vmap and derivatives."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES
from tests.kernels import native_library
from tests.kernels.test_paged_attention import LAYER, in_dtype, make_arrays
from tests.tolerances import ATTENTION_F32

native_library.require()

CASE = next(case for case in CASES if case.name == "sinks and window")
NAMES = ("q", "pool", "layer", "block_table", "positions", "lengths", "sinks")


def attend(
    q, pool, layer, block_table, positions, lengths, sinks, implementation="cpu", factors=None
):
    return paged_attention(
        q,
        pool,
        layer,
        block_table,
        positions,
        lengths,
        scale=0.25,
        value_dim=CASE.value_dim,
        window=CASE.window,
        softcap=CASE.softcap,
        sinks=sinks,
        factors=factors,
        implementation=implementation,
    )


def make_operands(seed: int = 0) -> dict:
    arrays = {**make_arrays(CASE, seed), "layer": np.int32(LAYER - seed % 2)}
    return {name: jnp.asarray(arrays[name]) for name in NAMES}


@pytest.mark.parametrize(
    "mapped",
    [
        ("q",),
        ("pool",),
        ("layer",),
        ("sinks",),
        ("q", "block_table", "positions", "lengths"),
        ("pool", "layer", "positions"),
        NAMES,
    ],
    ids=" ".join,
)
def test_vmap_equals_one_call_each(mapped):
    instances = [make_operands(seed) for seed in range(3)]
    base = instances[0]
    stacked = {n: jnp.stack([i[n] for i in instances]) if n in mapped else base[n] for n in NAMES}
    axes = tuple(0 if n in mapped else None for n in NAMES)
    out = jax.jit(jax.vmap(attend, in_axes=axes))(*stacked.values())
    for index, instance in enumerate(instances):
        alone = attend(**{n: (instance if n in mapped else base)[n] for n in NAMES})
        np.testing.assert_array_equal(np.asarray(out[index]), np.asarray(alone))


def test_nested_vmap_over_pools_and_then_queries():
    pools, queries = make_operands(0), [make_operands(seed)["q"] for seed in (1, 2)]
    rest = [pools[n] for n in NAMES[2:]]
    both = jnp.stack([pools["pool"], pools["pool"] * 0.5])

    def inner(pool):
        return jax.vmap(lambda q: attend(q, pool, *rest))(jnp.stack(queries))

    out = jax.vmap(inner, in_axes=0)(both)
    for i, j in np.ndindex(2, 2):
        np.testing.assert_array_equal(
            np.asarray(out[i, j]), np.asarray(attend(queries[j], both[i], *rest))
        )


def test_forward_derivatives_are_those_of_xla():
    operands = make_operands()
    rest = [operands[n] for n in NAMES[2:]]

    def along(implementation):
        f = lambda q, pool: attend(q, pool, *rest, implementation=implementation)  # noqa: E731
        moving = (operands["q"], operands["pool"])
        return jax.jit(lambda: jax.jvp(f, moving, (moving[0] * 0.5, moving[1] * 0.1)))()

    for got, known in zip(along("cpu"), along("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(known), **ATTENTION_F32)


def test_reverse_derivatives_are_refused_as_those_of_xla_are():
    operands = make_operands()
    rest = [operands[n] for n in NAMES[1:]]
    for implementation in ("cpu", "xla"):
        loss = lambda q, *rest, how=implementation: attend(q, *rest, how).sum()  # noqa: E731
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.jit(jax.grad(loss))(operands["q"], *rest)


def write_and_attend(pool, operands, steps: int, num_layers: int):
    """Write a token into every layer and attend, step by step: what decoding does to its cache."""
    batch = operands["lengths"].shape[0]
    rows = jnp.arange(batch, dtype=jnp.int32)

    def step(state):
        i, pool, q = state
        for layer in range(num_layers):
            new = jnp.broadcast_to(q[:, 0, :, :1], (batch, *pool.shape[2:4], pool.shape[5]))
            page = operands["block_table"][rows, (i // pool.shape[4]) % 2]
            pool = pool.at[layer, page, :, :, i % pool.shape[4]].set(new)
            q = q + attend(q, pool, layer, *[operands[n] for n in NAMES[3:]])
        return i + 1, pool, q

    return lax.while_loop(lambda s: s[0] < steps, step, (jnp.int32(0), pool, operands["q"]))[1:]


def test_a_donated_cache_is_never_copied():
    operands = make_operands()
    pool = jnp.tile(operands.pop("pool"), (1, 50, 1, 1, 1, 1))
    step = jax.jit(write_and_attend, static_argnums=(2, 3), donate_argnums=0)
    program = step.lower(pool, operands, 3, 2).compile()
    shape = ",".join(map(str, pool.shape))
    text = program.as_text()
    assert "PkPagedAttention" in text
    assert not re.findall(rf"f32\[{shape}\]\S* (?:copy|transpose)\(.*", text)
    assert program.memory_analysis().alias_size_in_bytes >= pool.nbytes
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes / 2
    pointer = pool.unsafe_buffer_pointer()
    out, _ = step(pool, operands, 3, 2)
    assert out.unsafe_buffer_pointer() == pointer


def test_a_cache_that_a_loop_only_reads_is_not_copied():
    operands = make_operands()
    pool = jnp.tile(operands.pop("pool"), (1, 50, 1, 1, 1, 1))

    def read(pool, operands):
        def step(q, _):
            return q + attend(q, pool, LAYER, *[operands[n] for n in NAMES[3:]]), None

        return lax.scan(step, operands["q"], None, length=3)[0]

    program = jax.jit(read).lower(pool, operands).compile()
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes / 2


def test_auto_takes_the_kernel_on_a_cpu_and_xla_elsewhere():
    operands = make_operands()
    auto = jax.jit(lambda **operands: attend(**operands, implementation="auto"))
    np.testing.assert_array_equal(np.asarray(auto(**operands)), np.asarray(attend(**operands)))
    assert "PkPagedAttention" in auto.lower(**operands).as_text()
    elsewhere = auto.trace(**operands).lower(lowering_platforms=("cuda",))
    assert "PkPagedAttention" not in elsewhere.as_text()


def test_auto_leaves_arrays_on_a_mesh_to_xla_but_not_the_shards_of_a_shard_map():
    operands = make_operands()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    everywhere = jax.device_put(operands, NamedSharding(mesh, PartitionSpec()))
    auto = jax.jit(lambda operands: attend(**operands, implementation="auto"))
    assert "PkPagedAttention" not in auto.lower(everywhere).as_text()

    island = jax.shard_map(auto, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    assert "PkPagedAttention" in jax.jit(island).lower(everywhere).as_text()
    known = np.asarray(attend(**operands))
    np.testing.assert_array_equal(np.asarray(jax.jit(island)(everywhere)), known)


def coded(seed: int = 0) -> dict:
    operands = make_operands(seed)
    encoded = in_dtype(CASE, operands, "int8")[0]
    return {**operands, "pool": encoded["pool"], "factors": encoded["factors"]}


@pytest.mark.parametrize("mapped", [("q",), ("pool", "factors"), ("factors",)], ids=" ".join)
def test_vmap_over_codes_equals_one_call_each(mapped):
    instances = [coded(seed) for seed in range(3)]
    base = instances[0]
    stacked = {
        n: jnp.stack([i[n] for i in instances]) if n in mapped else x for n, x in base.items()
    }
    axes = {n: 0 if n in mapped else None for n in base}
    out = jax.jit(jax.vmap(lambda kw: attend(**kw), in_axes=(axes,)))(stacked)
    for index, instance in enumerate(instances):
        alone = attend(**{n: (instance if n in mapped else base)[n] for n in base})
        np.testing.assert_array_equal(np.asarray(out[index]), np.asarray(alone))


def test_queries_over_codes_have_the_derivatives_of_xla():
    operands = coded()
    q = operands.pop("q")

    def along(implementation):
        f = lambda q: attend(q, **operands, implementation=implementation)  # noqa: E731
        return jax.jit(lambda: jax.jvp(f, (q,), (q * 0.5,)))()

    for got, known in zip(along("cpu"), along("xla"), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(known), **ATTENTION_F32)
