"""The C++ implementation of paged attention: its shapes, dtypes, and what a result depends on."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native
from pallas_kernels.paged_attention import cpu, paged_attention, transforms
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.hadamard import spread
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels import native_library
from tests.kernels.test_paged_attention import LAYER, dense_float64, in_dtype, make_arrays
from tests.tolerances import ATTENTION_BF16, ATTENTION_F32

native_library.require()

VARIANTS = range(len(native.variants()))

# Several spans of 256 positions, tiles of 64 that windows cut, units of more than 64 queries.
LONG = Case(
    name="spans",
    new_tokens=(1, 3, 40),
    context=(600, 255, 230),
    width=64,
    value_dim=64,
    q_per_kv=3,
    page_size=64,
)
WINDOWED = dataclasses.replace(LONG, name="spans and window", window=70, sinks=True)
CAPPED = dataclasses.replace(LONG, name="spans and softcap", softcap=5.0)
LATENT = Case(
    name="wide latent",
    new_tokens=(1, 9),
    context=(300, 70),
    num_kv_heads=1,
    q_per_kv=16,
    width=576,
    value_dim=512,
    planes=1,
    page_size=64,
)
LONG_CASES = (LONG, WINDOWED, CAPPED, LATENT)


def run(case: Case, arrays: dict, **options) -> np.ndarray:
    given = {k: None if v is None else jnp.asarray(v) for k, v in arrays.items()}
    static = {"value_dim": case.value_dim, "window": case.window, "softcap": case.softcap}
    step = compiled(scale=case.width**-0.5, **static, **options)
    return np.asarray(step(given).astype(jnp.float32))


@functools.cache
def compiled(**static):
    return jax.jit(lambda arrays: cpu.paged_attention(layer=LAYER, **arrays, **static))


FEATURES = {
    "width": (16, 64, 96, 128, 256, 33),
    "dtype": cpu.POOL_DTYPES,
    "q_per_kv": (1, 2, 3, 4, 7),
    "page_size": (16, 64, 5, 100),
    "planes": (2, 1),
    "window": (None, 21, 150),
    "softcap": (None, 3.0),
    "sinks": (False, True),
    "new_tokens": ((1, 1), (4, 1), (0, 26)),
}


def pairwise() -> list[dict]:
    """Return combinations in which every two values of two features meet, chosen greedily."""
    names = list(FEATURES)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FEATURES[a]
        for y in FEATURES[b]
    }
    rng, chosen = np.random.default_rng(0), []
    while pairs:
        tries = [{n: v[rng.integers(len(v))] for n, v in FEATURES.items()} for _ in range(60)]
        best = max(
            tries, key=lambda point: len(pairs & set(itertools.combinations(point.items(), 2)))
        )
        pairs -= set(itertools.combinations(best.items(), 2))
        chosen.append(best)
    return chosen


def make_point(point: dict) -> tuple[Case, str]:
    shape = {name: value for name, value in point.items() if name != "dtype"}
    value_dim = point["width"] if point["planes"] == 2 else point["width"] * 3 // 4
    context = (300, 131) if point["new_tokens"] == (1, 1) else (70, 260)
    return Case(name="", context=context, value_dim=value_dim, **shape), point["dtype"]


@pytest.mark.parametrize("point", pairwise(), ids=lambda p: "-".join(map(str, p.values())))
def test_every_two_features_go_together(point):
    case, dtype = make_point(point)
    arrays, values = in_dtype(case, make_arrays(case, poison=np.nan), dtype)
    known = dense_float64(case, {**arrays, "pool": values})
    for variant in VARIANTS:
        np.testing.assert_allclose(run(case, arrays, variant=variant), known, **ATTENTION_F32)


@pytest.mark.parametrize("case", LONG_CASES, ids=lambda c: c.name)
def test_every_variant_is_right_on_any_number_of_threads(case):
    arrays = make_arrays(case, poison=np.nan)
    known = dense_float64(case, arrays)
    for variant in VARIANTS:
        alone = run(case, arrays, variant=variant, threads=1)
        np.testing.assert_allclose(alone, known, **ATTENTION_F32)
        for threads in (2, 8):
            np.testing.assert_array_equal(
                run(case, arrays, variant=variant, threads=threads), alone
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8"])
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda c: c.name)
def test_a_query_has_the_same_bits_alone_and_among_others(case, dtype):
    arrays, _ = in_dtype(case, make_arrays(case, poison=np.nan), dtype)
    together = run(case, arrays)
    batch, tokens = arrays["positions"].shape
    for b, t in [(0, 0), (1, 0), *((batch - 1, t) for t in range(0, tokens, 3))]:
        position = arrays["positions"][b, t]
        one = {
            **arrays,
            "q": arrays["q"][b : b + 1, t : t + 1],
            "block_table": arrays["block_table"][b : b + 1],
            "positions": arrays["positions"][b : b + 1, t : t + 1],
            "lengths": np.array([position + 1], np.int32),
        }
        for threads in (1, 8):
            np.testing.assert_array_equal(run(case, one, threads=threads)[0, 0], together[b, t])


@pytest.mark.parametrize("case", LONG_CASES, ids=lambda c: c.name)
def test_pages_may_lie_anywhere_and_have_any_size(case):
    known = run(case, make_arrays(case, shuffle=False))
    for size in (5, 16, 64, 256):
        other = dataclasses.replace(case, page_size=size)
        np.testing.assert_array_equal(run(case, make_arrays(other, poison=np.nan)), known)


def test_a_longer_table_changes_nothing():
    arrays = make_arrays(LONG)
    known = run(LONG, arrays)
    arrays["block_table"] = np.pad(
        arrays["block_table"], ((0, 0), (0, 50)), constant_values=1 << 30
    )
    np.testing.assert_array_equal(run(LONG, arrays), known)


def test_nan_in_a_row_stays_in_that_row():
    arrays = make_arrays(LONG)
    known = run(LONG, arrays)
    arrays["pool"][:, arrays["block_table"][1, 0]] = np.nan
    got = run(LONG, arrays)
    np.testing.assert_array_equal(got[[0, 2]], known[[0, 2]])
    assert np.isnan(got[1, :3]).all()
    np.testing.assert_array_equal(got[1, 3:], 0)


def test_scores_of_any_size_keep_the_weights_exact():
    arrays = make_arrays(LONG)
    arrays["q"] = arrays["q"] * 300
    np.testing.assert_allclose(run(LONG, arrays), dense_float64(LONG, arrays), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layer", [LAYER, -1, -2, 7, -9])
def test_ids_out_of_range_mean_what_they_mean_to_the_reference(layer):
    case = CASES[3]
    arrays = make_arrays(case)
    arrays["block_table"][0, 0], arrays["block_table"][1, 0] = -2, 1 << 30
    arrays["block_table"][2, :2] = -(1 << 31), -1
    given = {k: jnp.asarray(v) for k, v in arrays.items() if k != "sinks"}
    static = {"scale": 0.3, "value_dim": case.value_dim, "layer": jnp.int32(layer)}
    got = paged_attention(**given, **static, implementation="cpu")
    known = paged_attention(**given, **static, implementation="reference")
    np.testing.assert_allclose(np.asarray(got), np.asarray(known), **ATTENTION_F32)


@pytest.mark.parametrize("width", [64, 24, 128])
@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_are_turned_to_meet_turned_keys(variant, width):
    case = dataclasses.replace(LONG, width=width, value_dim=width)
    arrays = make_arrays(case)
    turned = {**arrays, "q": np.asarray(spread(jnp.asarray(arrays["q"])))}
    found = run(case, arrays, variant=variant, turned=True)
    np.testing.assert_allclose(found, run(case, turned, variant=variant), **ATTENTION_F32)
    assert not np.allclose(found, run(case, arrays, variant=variant), atol=1e-3)


@pytest.mark.parametrize("implementation", ["xla", "reference", "auto", "cpu"])
def test_queries_of_16_bits_are_not_rounded_again_when_they_are_turned(implementation):
    """Turned in float32: as far from the exact result as other queries of 16 bits are."""
    arrays = {k: jnp.asarray(v) for k, v in make_arrays(LONG).items() if k != "sinks"}
    static = {"scale": 0.3, "value_dim": LONG.value_dim, "layer": LAYER}
    q = arrays.pop("q").astype(jnp.bfloat16)
    exact = paged_attention(
        spread(q.astype(jnp.float32)), **arrays, **static, implementation="reference"
    )
    found = paged_attention(q, **arrays, **static, turned=True, implementation=implementation)
    assert found.dtype == jnp.bfloat16
    error = np.abs(np.asarray(found.astype(jnp.float32)) - np.asarray(exact))
    assert (error <= 2.0**-8 * np.abs(np.asarray(exact)) + 2e-5).all()


@pytest.mark.parametrize("implementation", ["xla", "reference", "auto", "cpu"])
def test_every_implementation_turns_queries(implementation):
    arrays = {k: jnp.asarray(v) for k, v in make_arrays(CASES[3]).items() if k != "sinks"}
    static = {"scale": 0.3, "value_dim": CASES[3].value_dim, "layer": LAYER}

    def attend(q, **options):
        return paged_attention(**{**arrays, "q": q}, **static, **options)

    def found(q):
        return attend(q, turned=True, implementation=implementation)

    def known(q):
        return attend(spread(q), implementation="reference")

    q = arrays["q"]
    np.testing.assert_allclose(np.asarray(found(q)), np.asarray(known(q)), **ATTENTION_F32)
    ours, theirs = (jax.grad(lambda q, f=f: (f(q) ** 2).sum())(q) for f in (found, known))
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), **ATTENTION_F32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_result_has_the_dtype_of_q(dtype):
    arrays, values = in_dtype(LONG, make_arrays(LONG), dtype)
    q = jnp.asarray(arrays["q"], dtype)
    exact_q = np.asarray(q.astype(jnp.float32))
    out = compiled(scale=0.1, value_dim=64, window=None, softcap=None)({**arrays, "q": q})
    assert out.dtype == dtype
    case = dataclasses.replace(LONG, width=100)  # a scale of 0.1
    known = dense_float64(case, {**arrays, "q": exact_q, "pool": values})
    np.testing.assert_allclose(np.asarray(out.astype(jnp.float32)), known, **ATTENTION_BF16)


def test_rows_without_keys_are_zero_even_with_sinks():
    arrays = make_arrays(CASES[0])
    arrays["sinks"], arrays["lengths"] = np.ones((2, 2), np.float32), np.array([0, 8, 0], np.int32)
    out = run(CASES[0], arrays)
    assert not out[[0, 2]].any()
    assert out[1].any()


def test_a_pool_of_another_dtype_is_refused():
    arrays = make_arrays(CASES[0])
    with pytest.raises(KernelUnavailable, match="CPU kernel reads pages of float32"):
        run(CASES[0], {**arrays, "pool": arrays["pool"].astype(np.int32)})


def test_operands_that_do_not_fit_are_refused():
    arrays = make_arrays(CASES[0])
    given = [jnp.asarray(arrays[k]) for k in ("q", "pool", "block_table", "positions", "lengths")]
    call = cpu._attention(1.0, 16, cpu.NO_WINDOW, 0.0, False, -1, 0)
    q, pool, table, positions, lengths = given
    factors, sinks = jnp.zeros(transforms.NO_FACTORS, jnp.bfloat16), jnp.zeros((0, 2, 2))
    good = [q, pool, factors, jnp.zeros(3, jnp.int32), table, positions, lengths, sinks]
    call(*good)
    for index, bad, text in (
        (1, pool[:, :, :1], "other heads"),
        (1, pool[..., :8], "another width"),
        (1, pool[:, :0], "pool is empty"),
        (1, pool.astype(jnp.int8), "codes, and nothing else"),
        (2, jnp.ones(pool.shape[:5], jnp.bfloat16), "codes, and nothing else"),
        (2, jnp.ones((*pool.shape[:4], 1), jnp.bfloat16), "factors are"),
        (3, good[3][:2], "another batch"),
        (6, lengths[:1], "another batch"),
        (7, jnp.zeros((2, 2, 2)), "sinks are"),
    ):
        operands = [*good[:index], bad, *good[index + 1 :]]
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(call(*operands))
    with pytest.raises(jax.errors.JaxRuntimeError, match="cannot run that variant"):
        jax.block_until_ready(cpu._attention(1.0, 16, cpu.NO_WINDOW, 0.0, False, 17, 0)(*good))
