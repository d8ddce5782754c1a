"""Every implementation of the grouped matmul, on plain and on packed weights, against NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, cpu, grouped_matmul
from pallas_kernels.quant_matmul import ACTIVATIONS, PackedWeight, dequantize, quant_matmul
from pallas_kernels.quant_matmul.cases import CASES, Case, make_weight, quantize
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels import native_library
from tests.tolerances import MATMUL_F32, QUANT_MATMUL_F32, QUANT_MATMUL_ROUNDED

LONG = [case for case in CASES if case.name.endswith("long")]
PAIRS = [
    (case, activations)
    for case in LONG
    for activations in ACTIVATIONS
    if case.format in ACTIVATIONS[activations]
]
# Neighbours of one matrix, ragged ends, an empty tile between and one at the end.
GROUPS = np.array([2, 0, 0, 0, 1, 1, 2, 0], np.int32)
ROWS = np.array([3, 4, 4, 2, 0, 1, 4, 0], np.int32)
TILE = 4


def name_of(item) -> str:
    return item.name if isinstance(item, Case) else str(item)


@functools.cache
def make_stack(case: Case, size: int = 3) -> PackedWeight:
    weights = [quantize(make_weight(case, seed), case) for seed in range(size)]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def make_tiles(case: Case, num_tiles: int = len(GROUPS), tile: int = TILE) -> np.ndarray:
    shape = (num_tiles, tile, case.num_in)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def run(x, case: Case, groups=GROUPS, rows=ROWS, activations: str = "float32", **how) -> np.ndarray:
    native_library.require()
    arrays = (jnp.asarray(x), make_stack(case), jnp.asarray(groups), jnp.asarray(rows))
    return np.asarray(cpu.grouped_matmul(*arrays, activations=activations, **how))


def live(rows, tile: int) -> np.ndarray:
    return np.arange(tile) < np.asarray(rows)[:, None]


def make_arrays(rng: np.random.Generator, num_tiles: int = 5):
    x = rng.standard_normal((num_tiles, 4, 24)).astype(np.float32)
    weights = rng.standard_normal((3, 24, 40)).astype(np.float32)
    groups = np.array([2, 0, 0, 1, 2], np.int32)[:num_tiles]
    return jnp.asarray(x), jnp.asarray(weights), jnp.asarray(groups)


@pytest.mark.parametrize("implementation", sorted(set(IMPLEMENTATIONS) - {"cpu"}))
@pytest.mark.parametrize("rows", [(0, 0, 0, 0, 0), (4, 3, 1, 0, 0), (4, 4, 4, 4, 4)])
def test_plain_weights_equal_numpy(rng, implementation, rows):
    x, weights, groups = make_arrays(rng)
    got = grouped_matmul(x, weights, groups, jnp.array(rows), implementation=implementation)
    want = np.einsum(
        "nrd,ndf->nrf", np.asarray(x, np.float64), np.asarray(weights)[np.asarray(groups)]
    )
    want[~live(rows, 4)] = 0
    np.testing.assert_allclose(np.asarray(got), want, **MATMUL_F32)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_packed_weights_equal_float64(case, implementation):
    if implementation == "cpu":
        native_library.require()
    x, stack = make_tiles(case), make_stack(case)
    matrices = np.asarray(dequantize(stack), np.float64)[GROUPS]
    want = np.einsum("nrd,ndf->nrf", np.asarray(x, np.float64), matrices)
    size = np.einsum("nrd,ndf->nrf", np.abs(x), np.abs(matrices)) + 1e-30
    dead = ~live(ROWS, TILE)
    want[dead] = 0
    for activations in ACTIVATIONS:
        if case.format not in ACTIVATIONS[activations]:
            continue
        got = grouped_matmul(
            jnp.asarray(x),
            stack,
            jnp.asarray(GROUPS),
            jnp.asarray(ROWS),
            implementation=implementation,
            activations=activations,
        )
        limit = QUANT_MATMUL_F32 if activations == "float32" else QUANT_MATMUL_ROUNDED[activations]
        assert got.shape == want.shape
        assert got.dtype == x.dtype
        assert (np.abs(np.asarray(got) - want) / size).max(initial=0) <= limit
        np.testing.assert_array_equal(np.asarray(got)[dead], 0)


@pytest.mark.parametrize(("case", "activations"), PAIRS, ids=name_of)
def test_native_rows_have_the_bits_of_a_plain_product(case, activations):
    """In every variant, for any number of threads, wherever the row stands."""
    native_library.require()
    x = make_tiles(case)
    got = run(x, case, activations=activations)
    for tile, (group, rows) in enumerate(zip(GROUPS, ROWS, strict=True)):
        matrix = jax.tree.map(lambda leaf, group=group: leaf[group], make_stack(case))
        want = quant_matmul(
            jnp.asarray(x[tile, :rows]), matrix, implementation="cpu", activations=activations
        )
        np.testing.assert_array_equal(got[tile, :rows], np.asarray(want))
    for max_threads in (1, 2, 8):
        same = run(x, case, activations=activations, max_threads=max_threads)
        np.testing.assert_array_equal(same, got)
    for variant in native.variants():
        split = run(x, case, activations=activations, variant=variant)
        rows = x.reshape(-1, 1, case.num_in)  # every row a tile of its own
        groups, ones = np.repeat(GROUPS, TILE), live(ROWS, TILE).astype(np.int32).reshape(-1)
        single = run(rows, case, groups, ones, activations=activations, variant=variant)
        np.testing.assert_array_equal(single.reshape(split.shape), split)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_nan_in_rows_out_of_use_and_in_other_matrices_has_no_influence(implementation):
    native_library.require()
    case = LONG[4]
    x, stack = make_tiles(case), make_stack(case)
    how = {"implementation": implementation}
    clean = grouped_matmul(jnp.asarray(x), stack, jnp.asarray(GROUPS), jnp.asarray(ROWS), **how)
    x[~live(ROWS, TILE)] = np.nan
    poisoned = dataclasses.replace(stack, scales=stack.scales.at[1].set(jnp.nan))
    rows = np.where(GROUPS == 1, 0, ROWS)
    got = grouped_matmul(jnp.asarray(x), poisoned, jnp.asarray(GROUPS), jnp.asarray(rows), **how)
    want = np.where((GROUPS == 1)[:, None, None], 0, np.asarray(clean))
    np.testing.assert_array_equal(np.asarray(got), want)


def test_many_rows_of_one_matrix_are_one_product():
    """Full tiles that follow on each other run in the blocked loops, with the same bits."""
    case = LONG[8]
    x = make_tiles(case, 20)
    groups, rows = np.repeat(np.int32([2, 0]), 10), np.full(20, TILE, np.int32)
    got = run(x, case, groups, rows)
    apart = run(x[::-1], case, groups[::-1], rows)[::-1]
    mixed = np.array([0, 10, 1, 11, *range(2, 10), *range(12, 20)])
    np.testing.assert_array_equal(got, apart)
    np.testing.assert_array_equal(run(x[mixed], case, groups[mixed], rows), got[mixed])


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_a_group_outside_the_stack_reads_its_first_or_last_matrix(implementation):
    native_library.require()
    case, rows = LONG[4], np.full(2, TILE, np.int32)
    arrays = (jnp.asarray(make_tiles(case, 2)), make_stack(case))
    how = {"implementation": implementation}
    got = grouped_matmul(*arrays, jnp.array([-7, 99], jnp.int32), jnp.asarray(rows), **how)
    want = grouped_matmul(*arrays, jnp.array([0, 2], jnp.int32), jnp.asarray(rows), **how)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    got = grouped_matmul(*arrays, jnp.array([0, 2], jnp.int32), jnp.array([-1, 99]), **how)
    np.testing.assert_array_equal(np.asarray(got)[1], np.asarray(want)[1])
    np.testing.assert_array_equal(np.asarray(got)[0], 0)


def test_plain_row_is_the_same_bits_in_any_tile(rng):
    x, weights, groups = make_arrays(rng)
    run = jax.jit(grouped_matmul)
    rows = jnp.full(5, 4, jnp.int32)
    moved = run(x[::-1], weights, groups[::-1], rows)[::-1]
    np.testing.assert_array_equal(np.asarray(run(x, weights, groups, rows)), np.asarray(moved))


def test_plain_gradients_match_the_reference(rng):
    x, weights, groups = make_arrays(rng)
    rows = jnp.array([4, 2, 3, 0, 0], jnp.int32)

    def loss(x, weights, implementation):
        out = grouped_matmul(x, weights, groups, rows, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    got = jax.grad(loss, (0, 1))(x, weights, "xla")
    want = jax.grad(loss, (0, 1))(x, weights, "reference")
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **MATMUL_F32)


@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_gradients_in_x_and_in_the_weights_floats(activations):
    native_library.require()
    case = Case(name="int8", num_in=64, num_out=48, format="int8", group=32)
    stack, x = make_stack(case), jnp.asarray(make_tiles(case))
    indices = (jnp.asarray(GROUPS), jnp.asarray(ROWS))

    def loss(x, scales, implementation, activations):
        weights = dataclasses.replace(stack, scales=scales)
        how = {"implementation": implementation, "activations": activations}
        return jnp.sum(grouped_matmul(x, weights, *indices, **how) * jnp.cos(x[:, :, :48]))

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=(2, 3))
    got = gradient(x, stack.scales, "cpu", activations)
    want = jax.grad(loss, (0, 1))(x, stack.scales, "reference", "float32")
    # The cosine multiplies what the kernel computed, whose rounded activations show.
    tolerance = 1e-4 if activations == "float32" else 0.05
    for a, b in zip(got, want, strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)


def test_gradient_in_x_keeps_no_matrix_of_every_tile():
    case = Case(name="wide", num_in=64, num_out=64, format="int8")
    stack, x = make_stack(case), jnp.zeros((50, 2, 64))
    groups, rows = jnp.zeros(50, jnp.int32), jnp.ones(50, jnp.int32)

    def loss(x):
        return jnp.sum(jnp.sin(grouped_matmul(x, stack, groups, rows)))

    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert "[50,64,64]" not in text
    assert "[50,4,16,16,4]" not in text


@pytest.mark.parametrize("mapped", [(0, None, 0, 0), (None, 0, None, None), (0, 0, None, 0)])
def test_vmap_is_one_call_with_more_tiles(mapped):
    native_library.require()
    case = LONG[7]
    x = np.stack([make_tiles(case), 2 * make_tiles(case)])
    stacks = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf[::-1]]), make_stack(case))
    groups, rows = np.stack([GROUPS, GROUPS[::-1]]), np.stack([ROWS, ROWS[::-1]])
    whole = (jnp.asarray(x), stacks, jnp.asarray(groups), jnp.asarray(rows))
    args = [
        jax.tree.map(lambda leaf, axis=axis: leaf if axis == 0 else leaf[0], arg)
        for arg, axis in zip(whole, mapped, strict=True)
    ]

    def multiply(*arrays, implementation="cpu"):
        return grouped_matmul(*arrays, implementation=implementation)

    run = jax.vmap(multiply, mapped)
    jaxpr = str(jax.make_jaxpr(run)(*args))
    assert jaxpr.count("ffi_call") == 1
    got = run(*args)
    portable = jax.vmap(functools.partial(multiply, implementation="xla"), mapped)(*args)
    for index in range(2):
        one = [
            arg if axis is None else jax.tree.map(lambda leaf, index=index: leaf[index], arg)
            for arg, axis in zip(args, mapped, strict=True)
        ]
        want = multiply(*one)
        np.testing.assert_array_equal(np.asarray(got[index]), np.asarray(want))
        np.testing.assert_allclose(np.asarray(portable[index]), np.asarray(want), atol=1e-4)


def test_auto_runs_the_native_kernel_on_packed_weights_and_reads_them_where_they_lie():
    native_library.require()
    case = LONG[3]
    stack, x = make_stack(case), jnp.asarray(make_tiles(case))

    @jax.jit
    def steps(x, stack):
        def step(carry, _):
            out = grouped_matmul(carry, stack, jnp.asarray(GROUPS), jnp.asarray(ROWS))
            return jnp.tanh(jnp.tile(out, 5)[:, :, :300]), None

        return jax.lax.scan(step, x, None, length=3)[0]

    text = steps.lower(x, stack).compile().as_text()
    assert "PkGroupedMatmul" in text
    shape = ",".join(str(n) for n in stack.values.shape)
    reads = [line for line in text.splitlines() if f"s8[{shape}]" in line.split(" = ")[-1]]
    assert not [line for line in reads if " copy(" in line or " fusion(" in line]


def test_half_precision_tiles_come_back_in_their_type():
    case = LONG[3]
    x = make_tiles(case)
    want = run(x, case)
    for dtype in (jnp.bfloat16, jnp.float16):
        got = grouped_matmul(
            jnp.asarray(x).astype(dtype),
            make_stack(case),
            jnp.asarray(GROUPS),
            jnp.asarray(ROWS),
        )
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02, atol=0.3)


@pytest.mark.parametrize("implementation", sorted(IMPLEMENTATIONS))
def test_a_stack_of_no_matrices_is_refused(implementation):
    case = LONG[3]
    empty = jax.tree.map(lambda leaf: leaf[:0], make_stack(case))
    indices = (jnp.asarray(GROUPS), jnp.asarray(ROWS))
    with pytest.raises(ValueError, match="at least one matrix"):
        grouped_matmul(
            jnp.asarray(make_tiles(case)), empty, *indices, implementation=implementation
        )
    if implementation != "cpu":
        x, weights = jnp.zeros((8, 4, 24)), jnp.zeros((0, 24, 40))
        with pytest.raises(ValueError, match="at least one matrix"):
            grouped_matmul(x, weights, *indices, implementation=implementation)


def test_the_native_handler_itself_refuses_a_stack_of_no_matrices():
    case = LONG[3]
    empty = jax.tree.map(lambda leaf: leaf[:0], make_stack(case))
    native_library.require()
    with pytest.raises(jax.errors.JaxRuntimeError, match="at least one matrix"):
        cpu.grouped_matmul(
            jnp.asarray(make_tiles(case)),
            empty,
            jnp.asarray(GROUPS),
            jnp.asarray(ROWS),
            activations="float32",
        ).block_until_ready()


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_no_tiles_and_tiles_of_no_rows_are_nothing(implementation, shape):
    native_library.require()
    case, (num_tiles, height) = LONG[3], shape
    x = jnp.zeros((num_tiles, height, case.num_in))
    counts = jnp.zeros(num_tiles, jnp.int32)
    out = grouped_matmul(x, make_stack(case), counts, counts + 2, implementation=implementation)
    assert out.shape == (num_tiles, height, case.num_out)


def test_what_does_not_go_together_is_refused(monkeypatch):
    case = LONG[3]
    x, stack = jnp.asarray(make_tiles(case)), make_stack(case)
    indices = (jnp.asarray(GROUPS), jnp.asarray(ROWS))
    with pytest.raises(ValueError, match="not 'int7'"):
        grouped_matmul(x, stack, *indices, activations="int7")
    with pytest.raises(ValueError, match="rows of 300"):
        grouped_matmul(x[:, :, 1:], stack, *indices)
    with pytest.raises(ValueError, match="a stack of matrices"):
        grouped_matmul(x, jax.tree.map(lambda leaf: leaf[0], stack), *indices)
    with pytest.raises(ValueError, match="plain arrays"):
        grouped_matmul(x, jnp.zeros((3, 300, 5)), *indices, implementation="cpu")
    with pytest.raises(KeyError, match="warp"):
        grouped_matmul(x, stack, *indices, implementation="warp")
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no compiler")
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(KernelUnavailable, match="cannot run as 'cpu': no compiler"):
        grouped_matmul(x, stack, *indices, implementation="cpu")
    np.testing.assert_array_equal(
        np.asarray(grouped_matmul(x, stack, *indices)),
        np.asarray(grouped_matmul(x, stack, *indices, implementation="xla")),
    )
