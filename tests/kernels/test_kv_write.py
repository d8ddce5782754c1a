"""Writing to pages: every implementation against the reference, in place, and under transforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import native
from pallas_kernels.kv_write import IMPLEMENTATIONS, cpu, kv_write
from pallas_kernels.paged_attention import codes
from pallas_kernels.paged_attention.hadamard import spread
from pallas_kernels.unavailable import KernelUnavailable

needs_native = pytest.mark.skipif(not native.available(), reason="no native library")
LAYERS, PAGES, SIZE = 3, 6, 5
# Planes, heads, width, value columns: a latent's last columns have a factor of their own.
SHAPES = {"keys and values": (2, 3, 32, 32), "odd": (2, 1, 24, 24), "latent": (1, 1, 20, 16)}
POOLS = ("float32", "bfloat16", "float16", *codes.LARGEST)


def pools(shape: str, dtype: str, seed: int = 0):
    planes, heads, width, _ = SHAPES[shape]
    rng = np.random.default_rng(seed)
    values = rng.integers(-100, 100, (LAYERS, PAGES, heads, planes, SIZE, width))
    # 126 is the largest code of a float8; what would be above stands for NaN.
    pool = jnp.asarray(values % 127 if dtype == "uint8" else values).astype(dtype)
    if dtype not in codes.LARGEST:
        return pool, None
    factors = jnp.asarray(rng.random((LAYERS, PAGES, heads, 2, SIZE)), codes.FACTOR_DTYPE)
    return pool, factors


def tokens(shape: str, batch: int = 2, count: int = 4, seed: int = 1):
    """New tokens of very different sizes, and places: some of them outside."""
    planes, heads, width, _ = SHAPES[shape]
    rng = np.random.default_rng(seed)
    new = rng.standard_normal((batch, count, heads, planes, width))
    new *= np.exp(rng.uniform(-9, 9, (batch, count, heads, planes, 1)))
    places = rng.choice(PAGES * SIZE, batch * count, replace=False).reshape(batch, count)
    pages, offsets = places // SIZE, places % SIZE
    pages[0, 0], pages[-1, -1], offsets[0, -1] = -1, PAGES, SIZE
    return jnp.asarray(new, jnp.float32), jnp.asarray(pages), jnp.asarray(offsets)


def written(implementation, shape, dtype, layer=1, turned=False, token_dtype="float32", **options):
    run = functools.partial(IMPLEMENTATIONS[implementation], **options)
    new, pages, offsets = tokens(shape)
    new = new.astype("float16" if dtype == "float16" else token_dtype)
    held = pools(shape, dtype)
    static = {"value_dim": SHAPES[shape][3], "turned": turned}
    run = jax.jit(functools.partial(run, **static))
    return run(*held, jnp.int32(layer), new, pages.astype(jnp.int32), offsets.astype(jnp.int32))


def values_of(pool, factors, value_dim):
    """Return what a pool stands for, [L, P, K, S, C, W], in float32."""
    by_token = pool.swapaxes(3, 4)
    if factors is None:
        return np.asarray(by_token.astype(jnp.float32))
    return np.asarray(codes.decode(by_token, factors.swapaxes(3, 4), value_dim=value_dim))


CHECKED = [("xla", {}), *(("cpu", {"variant": i}) for i in range(4)), ("cpu", {"threads": 2})]


@pytest.mark.parametrize(("implementation", "options"), CHECKED)
@pytest.mark.parametrize("dtype", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_as_token_by_token(shape, dtype, implementation, options):
    if implementation == "cpu" and options.get("variant", 0) >= len(native.variants()):
        pytest.skip("this processor has no such variant")
    known = written("reference", shape, dtype)
    found = written(implementation, shape, dtype, **options)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert (np.asarray(known[0]) != np.asarray(pools(shape, dtype)[0])).any()


@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
@pytest.mark.parametrize("shape", SHAPES)
@needs_native
def test_tokens_of_16_bits_become_the_codes_of_what_they_are(shape, dtype):
    """In the middle between two codes, where bfloat16 often is, XLA may take the other one."""
    known = written("reference", shape, dtype, token_dtype="bfloat16")
    value_dim = SHAPES[shape][3]
    for variant in range(len(native.variants())):
        found = written("cpu", shape, dtype, token_dtype="bfloat16", variant=variant)
        np.testing.assert_array_equal(np.asarray(found[1]), np.asarray(known[1]))
        ours, theirs = np.asarray(found[0], np.int32), np.asarray(known[0], np.int32)
        assert np.abs(ours - theirs).max() <= 1
        assert np.mean(ours != theirs) < 1e-3
        values = values_of(*found, value_dim), values_of(*known, value_dim)
        np.testing.assert_allclose(*values, rtol=0.14, atol=np.abs(values[1]).max() / 100)


@pytest.mark.parametrize("token_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
@pytest.mark.parametrize("shape", ["keys and values", "odd"])
@needs_native
def test_turned_keys_are_those_that_are_turned_beforehand(shape, dtype, token_dtype):
    """Sums of another order round otherwise: a code may be the next one, where it nearly was."""
    _, _, width, value_dim = SHAPES[shape]
    before = values_of(*pools(shape, dtype), value_dim)
    options = {"token_dtype": token_dtype}
    known = values_of(*written("reference", shape, dtype, turned=True, **options), value_dim)
    straight = values_of(*written("reference", shape, dtype, **options), value_dim)
    for variant in range(len(native.variants())):
        found = written("cpu", shape, dtype, turned=True, variant=variant, **options)
        found = values_of(*found, value_dim)
        new = (known != before).any(-1)
        assert new.any()
        np.testing.assert_array_equal(found[~new], known[~new])
        peak = np.abs(known).max(-1, keepdims=True)
        step = peak / (127 if dtype == "int8" else 8)
        assert (np.abs(found - known) <= 1.01 * step).all()
        assert np.mean(found != known) < 2e-3
        # Values are not turned; keys are, and mean the same when they are turned back.
        assert np.mean(found[..., 1, :] != straight[..., 1, :]) < 1e-3
        back = np.asarray(spread(jnp.asarray(found[..., 0, :])))
        error = np.where(new[..., 0, None], np.abs(back - straight[..., 0, :]), 0)
        steps = 127 if dtype == "int8" else 16
        assert (error <= 3 * peak[..., 0, :] * np.sqrt(width) / steps).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
@pytest.mark.parametrize("turned", [False, True])
@needs_native
def test_what_is_not_finite_breaks_its_own_token_and_head(dtype, turned, bad):
    new, pages, offsets = tokens("keys and values")
    new = new.at[1, 1, 2, 0, 7].set(bad)
    static = {"value_dim": 32, "turned": turned, "implementation": "cpu"}
    held = pools("keys and values", dtype)
    known = kv_write(*held, 1, new.at[1, 1, 2, 0, 7].set(0), pages, offsets, **static)
    found = kv_write(*held, 1, new, pages, offsets, **static)
    place = (1, int(pages[1, 1]), 2, 0, int(offsets[1, 1]))
    assert np.isnan(np.asarray(found[1][place].astype(jnp.float32)))
    assert not np.asarray(found[0])[place].any()
    for ours, theirs, at in zip(found, known, (place, place), strict=True):
        ours = ours.at[at].set(theirs[at])
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@needs_native
def test_zeros_subnormal_numbers_and_the_largest_are_rounded_as_by_xla():
    new = np.zeros((1, 6, 3, 2, 32), np.float32)
    for i, size in enumerate((1e-40, 3e-38, 3.4e38, -0.0, 1.0)):
        new[0, i] = size * np.linspace(-1, 1, 32, dtype=np.float32)
    place = jnp.ones((1, 6), jnp.int32), jnp.array([[0, 1, 2, 3, 4, 9]])
    for dtype in codes.LARGEST:
        held = pools("keys and values", dtype)
        run = functools.partial(kv_write, *held, 1, jnp.asarray(new), *place, value_dim=32)
        for ours, known in zip(run(implementation="cpu"), run(implementation="xla"), strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(known))


@pytest.mark.parametrize("layer", [-1, LAYERS])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layer_outside_is_written_nowhere(implementation, layer):
    found = written(implementation, "odd", "int8", layer=layer)
    for ours, before in zip(found, pools("odd", "int8"), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(before))


@needs_native
def test_of_two_tokens_for_one_place_the_later_one_stays_whole():
    new = jax.random.normal(jax.random.key(0), (1, 40, 3, 2, 32))
    place = jnp.full((1, 40), 2), jnp.full((1, 40), 3)
    for threads in (1, 3):
        held = pools("keys and values", "int8")
        run = functools.partial(cpu.kv_write, value_dim=32, turned=False, threads=threads)
        found = run(*held, jnp.int32(1), new, *place)
        last = run(*held, jnp.int32(1), new[:, -1:], place[0][:, :1], place[1][:, :1])
        for ours, known in zip(found, last, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(known))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@needs_native
def test_a_donated_pool_is_written_where_it_lies(dtype):
    def steps(held, new, pages, offsets):
        def step(i, held):
            return kv_write(*held, i % LAYERS, new * i, pages, offsets, value_dim=32)

        return jax.lax.fori_loop(0, 5, step, held)

    run = jax.jit(steps, donate_argnums=0).lower(
        pools("keys and values", dtype), *tokens("keys and values")
    )
    compiled = run.compile()
    assert "PkKvWrite" in compiled.as_text()
    pool = pools("keys and values", dtype)[0]
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (None, 0, 0), (0, None, None), (None, None, 0)])
@needs_native
def test_vmap_is_a_loop(dtype, mapped):
    pool_axis, token_axis, layer_axis = mapped
    held = pools("odd", dtype)
    new, pages, offsets = tokens("odd")
    if pool_axis == 0:
        held = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), held)
    if token_axis == 0:
        new = jnp.stack([new, 2 * new])
    # A layer outside must not become one of the next instance's.
    layers = jnp.array([LAYERS, 2]) if layer_axis == 0 else jnp.int32(1)

    def run(held, layer, new):
        return kv_write(*held, layer, new, pages, offsets, value_dim=24, implementation="cpu")

    found = jax.vmap(run, in_axes=(pool_axis, layer_axis, token_axis))(held, layers, new)
    for i in range(2):
        known = run(
            instance(held, pool_axis, i),
            instance(layers, layer_axis, i),
            instance(new, token_axis, i),
        )
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(known), strict=True):
            np.testing.assert_array_equal(np.asarray(ours[i]), np.asarray(theirs))


def instance(tree, axis, i):
    return jax.tree.map(lambda x: x if axis is None else x[i], tree)


@needs_native
def test_derivatives_are_those_of_the_scatter():
    new, pages, offsets = tokens("odd")
    pool, _ = pools("odd", "float32")
    weights = jax.random.normal(jax.random.key(0), pool.shape)

    def loss(pool, new, implementation):
        out, _ = kv_write(
            pool, None, 1, new, pages, offsets, value_dim=24, implementation=implementation
        )
        return (out * weights).sum()

    ours = jax.grad(loss, (0, 1))(pool, new, "cpu")
    theirs = jax.grad(loss, (0, 1))(pool, new, "xla")
    for got, known in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(known))


@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
@needs_native
def test_derivatives_of_factors_under_vmap(dtype):
    new, pages, offsets = tokens("odd")
    held = pools("odd", dtype)
    scales = jnp.array([1.0, 2.0, -3.0])

    def loss(scale, implementation):
        static = {"value_dim": 24, "implementation": implementation}
        _, factors = kv_write(*held, 1, new * scale, pages, offsets, **static)
        return factors.astype(jnp.float32).sum()

    ours, theirs = (
        jax.vmap(jax.grad(functools.partial(loss, implementation=name)))(scales)
        for name in ("cpu", "xla")
    )
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert np.asarray(ours).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_to_write_and_nowhere_to_write_to(implementation):
    pool, factors = pools("odd", "int8")
    new, pages, offsets = tokens("odd")
    static = {"value_dim": 24, "implementation": implementation}
    same = kv_write(pool, factors, 1, new[:0], pages[:0], offsets[:0], **static)
    np.testing.assert_array_equal(np.asarray(same[0]), np.asarray(pool))
    none = kv_write(pool[:, :0], factors[:, :0], 1, new, pages, offsets, **static)
    assert none[0].shape == pool[:, :0].shape


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_pool_on_a_mesh_is_written_by_each_device(kind):
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    new, pages, offsets = tokens("keys and values")
    held = pools("keys and values", "int8")
    new, held = new[:, :, :2], jax.tree.map(lambda x: x[:, :, :2], held)
    known = kv_write(*held, 1, new, pages, offsets, value_dim=32, implementation="xla")
    cut = jax.device_put(held, NamedSharding(mesh, PartitionSpec(None, None, "heads")))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(kv_write, value_dim=32))
        text = run.lower(*cut, 1, new, pages, offsets).compile().as_text()
        found = run(*cut, 1, new, pages, offsets)
    assert "all-gather" not in text
    for ours, theirs in zip(found, known, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_what_does_not_go_together_is_refused():
    pool, factors = pools("odd", "int8")
    floats, _ = pools("odd", "float16")
    new, pages, offsets = tokens("odd")
    place = (new, pages, offsets)
    with pytest.raises(ValueError, match="int8 without factors"):
        kv_write(pool, None, 0, *place, value_dim=24)
    with pytest.raises(ValueError, match="float16 with factors"):
        kv_write(floats, factors, 0, *place, value_dim=24)
    with pytest.raises(ValueError, match="bfloat16, not float32"):
        kv_write(pool, factors.astype(jnp.float32), 0, *place, value_dim=24)
    with pytest.raises(ValueError, match="99 of 24 columns"):
        kv_write(pool, factors, 0, *place, value_dim=99)
    with pytest.raises(ValueError, match="become codes"):
        kv_write(floats, None, 0, *place, value_dim=24, turned=True)
    if native.available():
        with pytest.raises(KernelUnavailable, match="float32 to pages of float16"):
            kv_write(floats, None, 0, *place, value_dim=24, implementation="cpu")


@needs_native
def test_the_handler_refuses_what_would_be_written_elsewhere():
    pool, factors = pools("odd", "int8")
    new, pages, offsets = tokens("odd")
    write, layers = cpu._writer(24, False, -1, 0), jnp.zeros(2, jnp.int32)
    for wrong, match in (
        ((pool, factors, new[..., :8], layers, pages, offsets), "another width"),
        ((pool, factors, new, layers[:1], pages, offsets), "other tokens"),
        ((pool, factors, new, layers, pages[:, :2], offsets), "other tokens"),
        ((pool, factors[:, :, :, :1], new, layers, pages, offsets), "factors are"),
        ((pool[:, :, :, :0], factors, new[:, :, :, :0], layers, pages, offsets), "keys and values"),
        ((pool, factors, new.astype(jnp.float16), layers, pages, offsets), "this dtype"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=match):
            jax.block_until_ready(write(*wrong))
