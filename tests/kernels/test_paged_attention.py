"""Every implementation of paged attention against the reference, over the shared cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, codes, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case
from tests.kernels import native_library
from tests.tolerances import ATTENTION_BF16, ATTENTION_F32

NUM_LAYERS, LAYER = 2, 1

# Those that a CPU runs; test_gpu_paged_attention.py interprets the other.
HERE = sorted(set(IMPLEMENTATIONS) - {"gpu"})


def make_arrays(case: Case, seed: int = 0, *, poison: float = 0.0, shuffle: bool = True) -> dict:
    """Lay a case out in pages: shuffled page ids, `poison` wherever no live token stands."""
    rng = np.random.default_rng(seed)
    batch, tokens = len(case.new_tokens), max(case.new_tokens)
    lengths = np.add(case.new_tokens, case.context).astype(np.int32)
    per_row = -(-int(lengths.max()) // case.page_size) + 1
    order = (
        np.random.default_rng(seed + 1).permutation(batch * per_row)
        if shuffle
        else np.arange(batch * per_row)
    )
    table = 1 + order.reshape(batch, per_row).astype(np.int32)
    pool = np.full(
        (
            NUM_LAYERS,
            1 + batch * per_row,
            case.num_kv_heads,
            case.planes,
            case.page_size,
            case.width,
        ),
        poison,
        np.float32,
    )
    for row, length in enumerate(lengths):
        values = rng.standard_normal((length, case.num_kv_heads, case.planes, case.width))
        for t in range(length):
            pool[:, table[row, t // case.page_size], :, :, t % case.page_size] = values[t]
    offset = np.arange(tokens)[None]
    positions = np.where(
        offset < np.asarray(case.new_tokens)[:, None],
        np.asarray(case.context)[:, None] + offset,
        -1,
    )
    q = rng.standard_normal((batch, tokens, case.num_kv_heads, case.q_per_kv, case.width))
    sinks = rng.standard_normal((case.num_kv_heads, case.q_per_kv))
    return {
        "q": q.astype(np.float32),
        "pool": pool,
        "block_table": table,
        "positions": positions.astype(np.int32),
        "lengths": lengths,
        "sinks": sinks.astype(np.float32) if case.sinks else None,
    }


def in_dtype(case: Case, arrays: dict, dtype: str) -> tuple[dict, np.ndarray]:
    """Return arrays with a pool of another dtype, and the values that this pool stands for."""
    pool = jnp.asarray(arrays["pool"])
    if dtype not in codes.LARGEST:
        pool = pool.astype(dtype)
        return {**arrays, "pool": pool}, np.asarray(pool.astype(jnp.float32))
    pool, factors = codes.encode(pool.swapaxes(3, 4), dtype, value_dim=case.value_dim)
    values = codes.decode(pool, factors, value_dim=case.value_dim).swapaxes(3, 4)
    encoded = {"pool": pool.swapaxes(3, 4), "factors": factors.swapaxes(3, 4)}
    return {**arrays, **encoded}, np.asarray(values)


@functools.cache
def compiled(case: Case, implementation: str):
    if implementation == "cpu":
        native_library.require()

    def run(q, pool, block_table, positions, lengths, sinks, factors=None):
        return paged_attention(
            q,
            pool,
            LAYER,
            block_table,
            positions,
            lengths,
            scale=case.width**-0.5,
            value_dim=case.value_dim,
            window=case.window,
            softcap=case.softcap,
            sinks=sinks,
            factors=factors,
            implementation=implementation,
        )

    step = jax.jit(run)
    return lambda **arrays: step(**jax.tree.map(jnp.asarray, arrays))


def dense_float64(case: Case, arrays: dict) -> np.ndarray:
    """Attention of one row at a time over its own tokens, in float64: independent of pages."""
    q, pool, table = arrays["q"].astype(np.float64), arrays["pool"], arrays["block_table"]
    out = np.zeros((*q.shape[:4], case.value_dim))
    for b, t, k, g in np.ndindex(*q.shape[:4]):
        position = arrays["positions"][b, t]
        if position < 0:
            continue
        first = 0 if case.window is None else max(0, position - case.window + 1)
        seen = [
            (table[b, j // case.page_size], j % case.page_size) for j in range(first, position + 1)
        ]
        entries = np.stack([pool[LAYER, p, k, :, o] for p, o in seen]).astype(np.float64)
        scores = entries[:, 0] @ q[b, t, k, g] * case.width**-0.5
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        if case.sinks:
            scores = np.append(scores, arrays["sinks"][k, g])
        weights = np.exp(scores - scores.max())
        weights = (weights / weights.sum())[: len(seen)]
        out[b, t, k, g] = weights @ entries[:, -1, : case.value_dim]
    return out


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_paged_attention_equals_dense_float64(case: Case, implementation: str):
    arrays = make_arrays(case, poison=np.nan)
    got = np.asarray(compiled(case, implementation)(**arrays))
    np.testing.assert_allclose(got, dense_float64(case, arrays), **ATTENTION_F32)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention_over_codes_equals_attention_over_what_they_stand_for(
    case: Case, dtype: str, implementation: str
):
    arrays, values = in_dtype(case, make_arrays(case, poison=np.nan), dtype)
    got = np.asarray(compiled(case, implementation)(**arrays))
    known = dense_float64(case, {**arrays, "pool": values})
    np.testing.assert_allclose(got, known, **ATTENTION_F32)


@pytest.mark.parametrize("dtype", ["float32", *codes.LARGEST])
@pytest.mark.parametrize("case", CASES[:6], ids=lambda c: c.name)
def test_paged_attention_ignores_where_pages_lie_and_what_is_dead(case: Case, dtype: str):
    run = compiled(case, "xla")
    plain = run(**in_dtype(case, make_arrays(case, shuffle=False), dtype)[0])
    moved = run(**in_dtype(case, make_arrays(case, poison=np.nan), dtype)[0])
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(moved))


@pytest.mark.parametrize("implementation", ["cpu", "reference"])  # "xla" rounds weights, as always
def test_queries_in_sixteen_bits_read_codes_without_rounding_them(implementation: str):
    case = CASES[2]
    arrays, values = in_dtype(case, make_arrays(case), "int8")
    arrays["q"] = jnp.asarray(arrays["q"], jnp.bfloat16)
    got = compiled(case, implementation)(**arrays)
    assert got.dtype == jnp.bfloat16
    q = np.asarray(arrays["q"].astype(jnp.float32))
    known = dense_float64(case, {**arrays, "q": q, "pool": values})
    np.testing.assert_allclose(np.asarray(got.astype(jnp.float32)), known, **ATTENTION_BF16)


@pytest.mark.parametrize("dtype", sorted(codes.LARGEST))
def test_a_nan_among_codes_reaches_only_the_queries_that_see_it(dtype: str):
    case = CASES[2]
    arrays = make_arrays(case)
    arrays["pool"][:, arrays["block_table"][0, 1], 1, :, 7] = np.nan  # the row's 16th token, head 1
    for implementation in ("reference", "xla"):
        got = np.asarray(compiled(case, implementation)(**in_dtype(case, arrays, dtype)[0]))
        assert np.isnan(got[0, 15:20, 1]).all()
        assert np.isfinite(np.delete(got, 1, axis=2)).all()
        assert np.isfinite(got[1:]).all()


def test_codes_without_factors_are_refused_and_factors_without_codes():
    case = CASES[0]
    arrays = make_arrays(case)
    coded, _ = in_dtype(case, arrays, "int8")
    for wrong in ({**coded, "factors": None}, {**arrays, "factors": coded["factors"]}):
        with pytest.raises(ValueError, match="factors"):
            compiled(case, "xla")(**wrong)


@pytest.mark.parametrize("implementation", HERE)
def test_paged_attention_ignores_pages_that_the_window_has_left(implementation: str):
    """A short neighbour keeps the loop at page 0, where the long row's table holds other data."""
    case = Case(name="", new_tokens=(2, 1), context=(30, 3), window=5)
    arrays = make_arrays(case)
    known = dense_float64(case, arrays)
    arrays["pool"][:, 0] = np.nan
    arrays["block_table"][0, :3] = 0  # the queries at 30 and 31 see positions 26 to 31
    got = np.asarray(compiled(case, implementation)(**arrays))
    np.testing.assert_allclose(got, known, **ATTENTION_F32)


def test_paged_attention_row_does_not_depend_on_longer_neighbours():
    short = Case(name="", new_tokens=(1, 1), context=(5, 5))
    long = Case(name="", new_tokens=(1, 1), context=(5, 60))
    a, b = make_arrays(short), make_arrays(long)
    alone = compiled(short, "xla")(**a)
    b["q"] = a["q"]
    for t in range(6):
        page = (slice(None), b["block_table"][0, t // 8], slice(None), slice(None), t % 8)
        source = (slice(None), a["block_table"][0, t // 8], slice(None), slice(None), t % 8)
        b["pool"][page] = a["pool"][source]
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(compiled(long, "xla")(**b))[0])


def test_paged_attention_keeps_its_loop_unbatched_under_vmap():
    case = CASES[0]
    arrays = make_arrays(case)
    run = compiled(case, "xla")
    batched = {k: None if v is None else jnp.stack([v, v]) for k, v in arrays.items()}
    out = jax.vmap(lambda a: run(**a))(batched)
    np.testing.assert_allclose(np.asarray(out[1]), np.asarray(run(**arrays)), **ATTENTION_F32)
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda a: run(**a)))(batched))
    assert "while" in jaxpr
    pool_shape = ",".join(str(n) for n in (2, *arrays["pool"].shape))
    selects = [line for line in jaxpr.splitlines() if "select_n" in line and pool_shape in line]
    assert not selects


def test_paged_attention_unknown_implementation_is_refused():
    with pytest.raises(KeyError, match="warp"):
        compiled(CASES[0], "warp")(**make_arrays(CASES[0]))
