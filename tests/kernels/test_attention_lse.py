"""The logarithm of the sum of weights that comes with paged attention, and what it is good for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.combine import combine
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case
from pallas_kernels.paged_attention.gpu import paged_attention as attend_on_gpu
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels.test_paged_attention import LAYER, dense_float64, in_dtype, make_arrays
from tests.tolerances import ATTENTION_F32

PORTABLE = ("reference", "xla")
CHOSEN = [
    case
    for case in CASES
    if case.name in ("prefill", "a row of padding only", "window of pages", "sinks", "softcap")
] + [case for case in CASES if case.name == "latent"]


def attend(case: Case, arrays: dict, implementation: str, **how):
    static = {"scale": case.width**-0.5, "value_dim": case.value_dim, "window": case.window}
    run = functools.partial(
        paged_attention,
        layer=LAYER,
        softcap=case.softcap,
        implementation=implementation,
        **(static | how),
    )
    given = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    return jax.jit(lambda arrays: run(**arrays))(given)


def lse_float64(case: Case, arrays: dict) -> np.ndarray:
    """One query at a time over its own tokens, in float64."""
    q, pool, table = arrays["q"].astype(np.float64), arrays["pool"], arrays["block_table"]
    out = np.zeros(q.shape[:4])
    for b, t, k, g in np.ndindex(*q.shape[:4]):
        position = arrays["positions"][b, t]
        first = 0 if case.window is None else max(0, position - case.window + 1)
        places = [divmod(j, case.page_size) for j in range(first, position + 1)]
        keys = [pool[LAYER, table[b, page], k, 0, offset] for page, offset in places]
        scores = np.asarray(keys, np.float64).reshape(-1, case.width) @ q[b, t, k, g]
        scores = scores * case.width**-0.5
        if case.softcap:
            scores = case.softcap * np.tanh(scores / case.softcap)
        if case.sinks:
            scores = np.append(scores, arrays["sinks"][k, g])
        with np.errstate(divide="ignore"):
            out[b, t, k, g] = np.log(np.exp(scores).sum())
    return out


@pytest.mark.parametrize("implementation", PORTABLE)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda c: c.name)
def test_lse_equals_float64_and_is_minus_infinity_where_nothing_is_seen(
    case: Case, implementation: str
):
    arrays = make_arrays(case, poison=np.nan)
    out, lse = attend(case, arrays, implementation, lse=True)
    assert lse.dtype == jnp.float32
    known = lse_float64(case, arrays)
    assert case.sinks or np.isneginf(known[arrays["positions"] < 0]).all()
    np.testing.assert_allclose(np.asarray(lse), known, **ATTENTION_F32)
    np.testing.assert_allclose(np.asarray(out), dense_float64(case, arrays), **ATTENTION_F32)


def test_lse_over_codes_is_that_of_what_they_stand_for():
    case = CASES[2]
    arrays, values = in_dtype(case, make_arrays(case), "int8")
    known = lse_float64(case, {**arrays, "pool": values})
    for implementation in PORTABLE:
        _, lse = attend(case, arrays, implementation, lse=True)
        np.testing.assert_allclose(np.asarray(lse), known, **ATTENTION_F32)


def test_lse_stays_float32_where_queries_are_turned_or_have_sixteen_bits():
    case = CASES[0]
    arrays, _ = in_dtype(case, make_arrays(case), "int8")
    arrays["q"] = jnp.asarray(arrays["q"], jnp.bfloat16)
    for implementation in PORTABLE:
        out, lse = attend(case, arrays, implementation, lse=True, turned=True)
        assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_cpu_kernel_says_that_it_has_no_lse_and_auto_takes_xla():
    case = CASES[0]
    arrays = make_arrays(case)
    with pytest.raises(KernelUnavailable, match=r"logarithms|native"):
        attend(case, arrays, "cpu", lse=True)
    for one, other in zip(
        attend(case, arrays, "auto", lse=True), attend(case, arrays, "xla", lse=True), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", ["sinks", "softcap"])
def test_gpu_kernel_returns_lse(name: str):
    case = Case(
        name=name,
        new_tokens=(1, 2, 0),
        context=(90, 0, 0),
        q_per_kv=2,
        num_kv_heads=1,
        width=64,
        value_dim=64,
        page_size=16,
        softcap=2.0 if name == "softcap" else None,
        sinks=name == "sinks",
    )
    arrays, values = in_dtype(case, make_arrays(case, poison=np.nan), "bfloat16")
    arrays["q"] = jnp.asarray(arrays["q"], jnp.bfloat16)
    given = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out, lse = attend_on_gpu(
        **given,
        layer=LAYER,
        scale=0.125,
        value_dim=64,
        window=None,
        softcap=case.softcap,
        target="sm_90",
        interpret=interpret,
        lse=True,
    )
    rounded = {**arrays, "q": np.asarray(arrays["q"].astype(jnp.float32)), "pool": values}
    known = lse_float64(case, rounded)
    np.testing.assert_allclose(np.asarray(lse), known, **ATTENTION_F32)
    assert out.dtype == jnp.bfloat16


def test_mapped_attention_with_lse_is_that_of_each():
    case = CASES[0]
    arrays = make_arrays(case)
    one = attend(case, arrays, "xla", lse=True)
    given = {n: jnp.asarray(x) for n, x in arrays.items() if x is not None}
    run = functools.partial(paged_attention, layer=LAYER, scale=case.width**-0.5)

    def call(q):
        others = {n: x for n, x in given.items() if n != "q"}
        return run(q, **others, value_dim=case.value_dim, lse=True, implementation="xla")

    both = jax.vmap(call)(jnp.stack([given["q"], given["q"]]))
    for single, mapped in zip(one, both, strict=True):
        np.testing.assert_allclose(np.asarray(mapped[1]), np.asarray(single), **ATTENTION_F32)


def test_halves_of_a_row_combine_to_the_whole_with_sinks_applied_once():
    """Pages before a boundary in one call, those after it in another, as ranks of a mesh would."""
    case = Case(name="", new_tokens=(1, 1), context=(30, 12), sinks=True)
    arrays = make_arrays(case)
    whole, lse = attend(case, arrays, "reference", lse=True)
    parts = []
    size = case.page_size
    for first in (0, 2):
        cut = {**arrays, "block_table": arrays["block_table"][:, first : first + 2], "sinks": None}
        left = np.maximum(arrays["lengths"] - first * size, 0)
        # Later pages are seen from a position as far from their first as it is from theirs.
        cut |= {
            "positions": np.maximum(arrays["positions"] - first * size, -1).astype(np.int32),
            "lengths": np.minimum(left, 2 * size).astype(np.int32),
        }
        cut["positions"] = np.where(left[:, None] > 0, cut["positions"], -1)
        parts.append(attend(case, cut, "xla", lse=True))
    outs, lses = (jnp.stack(x) for x in zip(*parts, strict=True))
    joined, total = combine(outs, lses, sinks=jnp.asarray(arrays["sinks"]))
    np.testing.assert_allclose(np.asarray(joined), np.asarray(whole), **ATTENTION_F32)
    np.testing.assert_allclose(np.asarray(total), np.asarray(lse), **ATTENTION_F32)
