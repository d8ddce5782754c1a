"""The GPU kernel of paged attention in Mosaic's interpreter, which runs it on a CPU.

The interpreter moves pages, waits for barriers and detects races as a GPU would, but does not
compute as one, and cannot see three things:

- What tensor cores read. Where interpreted, products read shared memory as other code does; their
  operands' layouts are only checked by compiling (`make gates`).
- Warps. Its thread is a warpgroup, so a missing barrier between warps shows only where it also
  orders a copy by TMA.
- `cp.async`, by which sm_80 copies: that ring is only compiled.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import (
    codes,
    gpu,
    gpu_extend,
    gpu_kernel,
    gpu_targets,
    paged_attention,
    transforms,
)
from pallas_kernels.paged_attention.cases import Case
from pallas_kernels.paged_attention.combine import combine
from pallas_kernels.unavailable import KernelUnavailable
from tests.kernels.test_paged_attention import LAYER, dense_float64, in_dtype, make_arrays
from tests.tolerances import ATTENTION_BF16_WEIGHTS

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def make_case(**fields) -> Case:
    width = fields.pop("width", 64)
    fields = {"name": "", "page_size": 16, "num_kv_heads": 1, **fields}
    return Case(width=width, value_dim=width, **fields)


# Every feature once; most go through the ring of blocks more than once.
CASES = {
    "decode": make_case(new_tokens=(1, 1, 0, 1), context=(0, 200, 0, 63), q_per_kv=4),
    "heads and groups": make_case(new_tokens=(1,), context=(70,), num_kv_heads=2, q_per_kv=3),
    "verify": make_case(new_tokens=(4, 1), context=(126, 7), q_per_kv=3, page_size=32),
    "chunk of tiles": make_case(new_tokens=(40,), context=(30,), page_size=64),
    "window": make_case(new_tokens=(2, 1), context=(250, 3), window=70, page_size=64),
    "softcap and sinks": make_case(new_tokens=(1, 1), context=(90, 0), softcap=2.0, sinks=True),
    "overlapping slices": make_case(new_tokens=(1,), context=(140,), width=96),
    "wide": make_case(new_tokens=(1,), context=(140,), width=256, window=1),
}


def attend(case: Case, arrays: dict, *, dtype: str = "bfloat16", scale: float | None = None, **how):
    """Return what the kernel computes, and from what: arrays as they are after rounding."""
    arrays, values = in_dtype(case, arrays, dtype)
    arrays["q"] = jnp.asarray(arrays["q"], dtype if dtype in gpu.DTYPES else "bfloat16")
    static = {"value_dim": case.value_dim, "window": case.window, "softcap": case.softcap}
    how = {"target": "sm_90", "splits": 2, "interpret": INTERPRET, **how}
    run = functools.partial(gpu.paged_attention, scale=scale or case.width**-0.5, **static, **how)
    given = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    out = jax.jit(lambda arrays: run(layer=LAYER, **arrays))(given)
    assert out.dtype == arrays["q"].dtype
    rounded = {**arrays, "q": np.asarray(arrays["q"].astype(jnp.float32)), "pool": values}
    return np.asarray(out.astype(jnp.float32)), rounded


@pytest.mark.parametrize("name", CASES)
def test_gpu_kernel_equals_dense_float64_and_ignores_what_is_dead(name: str):
    case = CASES[name]
    target = "sm_100" if name in ("window", "overlapping slices") else "sm_90"
    got, rounded = attend(case, make_arrays(case, poison=np.nan), target=target)
    np.testing.assert_allclose(got, dense_float64(case, rounded), **ATTENTION_BF16_WEIGHTS)


# Two tiles, of which each sees more blocks than the ring has slots.
EXTENDED = {
    "chunk": make_case(new_tokens=(40, 3), context=(110, 9), q_per_kv=4, page_size=64, sinks=True),
    "window": make_case(new_tokens=(40,), context=(200,), q_per_kv=3, width=96, window=150),
}


@pytest.mark.parametrize("name", EXTENDED)
def test_kernel_for_many_queries_equals_dense_float64(name: str):
    case = EXTENDED[name]
    got, rounded = attend(case, make_arrays(case, poison=np.nan), splits=None, extend=True)
    np.testing.assert_allclose(got, dense_float64(case, rounded), **ATTENTION_BF16_WEIGHTS)


CODED = {
    "int8": make_case(new_tokens=(1, 3), context=(200, 7), q_per_kv=3, page_size=64, sinks=True),
    "uint8": make_case(new_tokens=(1,), context=(150,), width=96, page_size=64, window=70),
}


@pytest.mark.parametrize("dtype", CODED)
def test_gpu_kernel_reads_codes(dtype: str):
    case = CODED[dtype]
    got, rounded = attend(case, make_arrays(case, poison=np.nan), dtype=dtype, splits=1)
    np.testing.assert_allclose(got, dense_float64(case, rounded), **ATTENTION_BF16_WEIGHTS)


def test_gpu_kernel_computes_in_float16():
    case = CASES["heads and groups"]
    got, rounded = attend(case, make_arrays(case, poison=np.nan), dtype="float16", splits=1)
    np.testing.assert_allclose(got, dense_float64(case, rounded), **ATTENTION_BF16_WEIGHTS)


def test_gpu_kernel_ignores_where_pages_lie_and_tables_longer_than_rows():
    case = CASES["verify"]
    plain, _ = attend(case, make_arrays(case, shuffle=False))
    arrays = make_arrays(case, poison=np.nan)
    far = np.full((2, 3), 1 << 30, np.int32)
    arrays["block_table"] = np.concatenate([arrays["block_table"], far], axis=1)
    moved, _ = attend(case, arrays)
    np.testing.assert_array_equal(plain, moved)


def test_gpu_kernel_gives_the_same_for_any_number_of_splits():
    case = make_case(new_tokens=(1, 1), context=(200, 1), sinks=True)
    got = [attend(case, make_arrays(case), splits=splits)[0] for splits in (1, 8)]
    np.testing.assert_allclose(*got, **ATTENTION_BF16_WEIGHTS)


def test_longer_table_has_more_splits_and_changes_no_bit():
    case = make_case(new_tokens=(1,), context=(330,), page_size=64, q_per_kv=1)
    arrays = make_arrays(case)
    short, _ = attend(case, arrays, splits=None)
    arrays["block_table"] = np.pad(arrays["block_table"], ((0, 0), (0, 30)))
    long, _ = attend(case, arrays, splits=None)
    np.testing.assert_array_equal(short, long)


def test_table_narrower_than_a_length_ends_the_row():
    case = make_case(new_tokens=(1,), context=(70,))
    arrays = make_arrays(case)
    arrays["block_table"] = arrays["block_table"][:, :4]
    got, rounded = attend(case, arrays)
    given = {name: jnp.asarray(x) for name, x in rounded.items() if x is not None}
    static = {"scale": case.width**-0.5, "value_dim": case.width, "layer": LAYER}
    known = paged_attention(**given, **static, implementation="reference")
    np.testing.assert_allclose(got, np.asarray(known), **ATTENTION_BF16_WEIGHTS)


# --- Faults that the race detector has to find; blocks outnumber slots, so that slots are refilled.

LONG = make_case(new_tokens=(1,), context=(250,))


def do_not_wait(self, slot):
    """A wait that is missing."""


def do_not_join(self):
    """A barrier that is missing."""


def refill_too_early(self, slot):
    """Ask for a page in a slot whose values have not been read."""
    plgpu.barrier_wait(self.values_here.at[slot])
    place = self.values_s.at[slot, : self.sizes.page]
    self.ask(self.page_at(jnp.int32(0), gpu_kernel.VALUES), place, self.values_here.at[slot])


FAULTS = {
    "wait_for_keys": do_not_wait,
    "wait_for_values": do_not_wait,
    "join_warps": do_not_join,
    "wait_for_values, refilled": refill_too_early,
}


@pytest.mark.parametrize("name", FAULTS)
def test_race_is_found(name: str, monkeypatch):
    monkeypatch.setattr(gpu_kernel._Ring, name.split(",")[0], FAULTS[name])
    # A scale of its own, so that nothing traced without the fault is used again, nor this later.
    scale = 1.0 + sorted(FAULTS).index(name) / 16
    found = "RACE DETECTED|Barrier completed phase 1, but no threads observed phase 0"
    with pytest.raises(jax.errors.JaxRuntimeError, match=found):
        attend(LONG, make_arrays(LONG), splits=1, scale=scale)


FAULTS_OF_MANY = {
    "_wait_until_read": lambda slot, scratch: None,
    # Zeros where the other worker reads.
    "_own_slot": lambda tile, worker, slot: slot,
}


@pytest.mark.parametrize("name", FAULTS_OF_MANY)
def test_race_is_found_among_many_queries(name: str, monkeypatch):
    monkeypatch.setattr(gpu_extend, name, FAULTS_OF_MANY[name])
    case, scale = EXTENDED["chunk"], 2.0 + sorted(FAULTS_OF_MANY).index(name) / 16
    with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
        attend(case, make_arrays(case), splits=None, extend=True, scale=scale)


def test_correct_kernel_has_no_race_where_slots_are_refilled():
    got, rounded = attend(LONG, make_arrays(LONG), splits=1)
    np.testing.assert_allclose(got, dense_float64(LONG, rounded), **ATTENTION_BF16_WEIGHTS)


# --- Joining parts.


def test_combine_is_attention_over_all_parts_with_the_sink_once():
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((3, 5, 7)) * 9, rng.standard_normal((3, 5, 7, 4))
    scores[1, 2] = scores[:, 3] = -np.inf  # a part without keys, and a row without any
    sinks = np.array([2.0, -50.0, 30.0, 1.0, 0.0])
    peaks = np.maximum(scores.max(-1) * np.log2(np.e), -1e20)
    weights = np.exp2(scores * np.log2(np.e) - peaks[..., None])
    parts = [(weights[..., None] * values).sum(2), peaks, weights.sum(-1)]
    for sink in (None, sinks):
        arrays = [None if x is None else jnp.asarray(x, jnp.float32) for x in (*parts, sink)]
        out, lse = combine(*arrays)
        flat = np.moveaxis(scores, 0, 1).reshape(5, 21)
        terms = flat if sink is None else np.concatenate([flat, sink[:, None]], axis=1)
        with np.errstate(divide="ignore"):
            known_lse = np.log(np.exp(terms).sum(1))
        share = np.exp(flat - np.where(np.isfinite(known_lse), known_lse, 0.0)[:, None])
        known = np.einsum("rs,rsw->rw", share, np.moveaxis(values, 0, 1).reshape(5, 21, 4))
        np.testing.assert_allclose(np.asarray(out), known, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(np.asarray(lse), known_lse, rtol=2e-5, atol=2e-6)


def test_logarithm_of_the_sum_of_weights_comes_with_attention():
    case = make_case(new_tokens=(1, 0), context=(60, 0))
    arrays, _ = in_dtype(case, make_arrays(case), "bfloat16")
    arrays["q"] = jnp.asarray(arrays["q"], jnp.bfloat16)
    arrays["sinks"] = None
    given = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    operands = transforms.operands(layer=LAYER, factors=None, **given)
    static = {"scale": 0.125, "window": None, "softcap": None, "interpret": INTERPRET}
    _, lse = gpu.attend(*operands, target=gpu_targets.TARGETS["sm_90"], splits=2, **static)
    tokens = [(p, o) for p in arrays["block_table"][0] for o in range(16)][:61]
    keys = np.stack([np.asarray(arrays["pool"][LAYER, p, 0, 0, o], np.float64) for p, o in tokens])
    scores = keys @ np.asarray(arrays["q"][0, 0, 0], np.float64).T * 0.125
    np.testing.assert_allclose(lse[0, 0, 0], np.log(np.exp(scores).sum(0)), rtol=2e-5)
    assert np.isneginf(np.asarray(lse[1])).all()


def test_mapped_queries_and_pools_fold_into_the_batch():
    case = make_case(new_tokens=(1,), context=(70,))
    arrays, values = in_dtype(case, make_arrays(case), "bfloat16")
    q = jnp.asarray(arrays["q"], jnp.bfloat16)
    given = {n: jnp.asarray(arrays[n]) for n in ("block_table", "positions", "lengths")}
    static = {"value_dim": 64, "window": None, "softcap": None, "sinks": None, "splits": 1}

    def run(q, pool):
        where = {"layer": LAYER, "target": "sm_90", "interpret": INTERPRET}
        return gpu.paged_attention(q, pool, **given, scale=0.125, **static, **where)

    pools = jnp.stack([arrays["pool"], -arrays["pool"]])
    got = jax.jit(jax.vmap(run))(jnp.stack([q, -q]), pools)
    known = dense_float64(case, {**arrays, "q": np.asarray(q.astype(jnp.float32)), "pool": values})
    for sign, out in zip((1, -1), got, strict=True):
        np.testing.assert_allclose(
            sign * np.asarray(out.astype(jnp.float32)), known, **ATTENTION_BF16_WEIGHTS
        )


# --- Where it runs.


@pytest.fixture
def on_gpu(monkeypatch):
    """Let the process see a GPU of a kind."""

    def see(name: str | None) -> None:
        gpu_targets.unavailable_reason.cache_clear()
        monkeypatch.setattr(gpu_targets, "_name_at_hand", lambda: name)

    yield see
    gpu_targets.unavailable_reason.cache_clear()


def abstract(*, dtype="bfloat16", pool_dtype=None, width=64, page_size=16, planes=2) -> dict:
    array = jax.ShapeDtypeStruct
    return {
        "q": array((2, 1, 2, 4, width), dtype),
        "pool": array((2, 9, 2, planes, page_size, width), pool_dtype or dtype),
        "block_table": array((2, 4), jnp.int32),
        "positions": array((2, 1), jnp.int32),
        "lengths": array((2,), jnp.int32),
        "factors": array((2, 9, 2, 2, page_size), jnp.bfloat16) if pool_dtype == "int8" else None,
    }


def traced(implementation: str, arrays: dict, value_dim: int | None = None):
    def run(arrays):
        width = arrays["pool"].shape[-1]
        static = {"layer": 0, "scale": 0.1, "value_dim": value_dim or width}
        return paged_attention(**arrays, **static, implementation=implementation)

    return jax.jit(run).trace(arrays)


@pytest.mark.parametrize(
    ("name", "arrays", "text"),
    [
        (None, {}, "no NVIDIA GPU"),
        ("sm_75", {}, "sm_80, sm_90, sm_100, not sm_75"),
        ("sm_90", {"planes": 1}, "latents"),
        ("sm_90", {"dtype": "float32"}, "not float32 and float32"),
        ("sm_90", {"pool_dtype": "float16"}, "not bfloat16 and float16"),
        ("sm_90", {"pool_dtype": "int8"}, "pages of 64, not 16"),
        ("sm_80", {"pool_dtype": "int8", "page_size": 64}, "codes on sm_90 and later"),
        ("sm_90", {"width": 80}, "heads of 64, 96, 128, 256, not 80"),
        ("sm_90", {"page_size": 8}, "pages of 16, 32, 64, not 8"),
        ("sm_80", {"page_size": 16}, "pages of 32, 64, not 16"),
    ],
)
def test_gpu_says_why_it_cannot_run_and_auto_takes_another(on_gpu, name, arrays, text):
    on_gpu(name)
    with pytest.raises(KernelUnavailable, match=text):
        traced("gpu", abstract(**arrays))
    lowered = traced("auto", abstract(**arrays)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" not in lowered.as_text()


def test_auto_takes_the_kernel_for_a_gpu_and_not_for_a_cpu(on_gpu):
    on_gpu("sm_90")
    auto = traced("auto", abstract())
    assert "mosaic_gpu" in auto.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" not in auto.lower(lowering_platforms=("cpu",)).as_text()


def test_older_jax_is_refused_where_it_cannot_compile(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert gpu_targets.target_for("sm_90").product == "wgmma"
    with pytest.raises(KernelUnavailable, match="on sm_100 the kernels need jax 0"):
        gpu_targets.target_for("sm_100")


def test_kernel_for_many_queries_is_taken_where_they_fill_a_gpu():
    def chosen(batch: int, tokens: int, **how) -> bool:
        arrays, found = abstract(**how), []
        q = jax.ShapeDtypeStruct((batch, tokens, *arrays["q"].shape[2:]), jnp.bfloat16)
        sm_90 = gpu_targets.TARGETS["sm_90"]

        def choose(q, pool):
            found.append(gpu._no_extend(q, pool, sm_90) is None and gpu._fills(q, sm_90))

        jax.eval_shape(choose, q, arrays["pool"])
        return found[0]

    assert chosen(1, 4096)
    assert not chosen(1, 256)
    assert not chosen(64, 1)
    assert not chosen(1, 4096, width=256)
    assert not chosen(1, 4096, pool_dtype="int8")


def test_kernel_for_many_queries_asked_for_where_it_cannot_run_is_refused():
    case = make_case(new_tokens=(1,), context=(3,))
    with pytest.raises(KernelUnavailable, match="many queries is for sm_90"):
        attend(case, make_arrays(case), extend=True, target="sm_100")
    wide = dataclasses.replace(case, width=256, value_dim=256)
    with pytest.raises(KernelUnavailable, match="heads of 64, 96, 128, and no codes"):
        attend(wide, make_arrays(wide), extend=True)


def test_unknown_target_is_refused():
    with pytest.raises(KernelUnavailable, match="sm_80, sm_90, sm_100, not sm_42"):
        gpu_targets.target_for("sm_42")


# --- More shapes.


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gpu_kernel_equals_dense_float64_over_many_shapes(data):
    page_size = data.draw(st.sampled_from(gpu.PAGE_SIZES))
    edges = (0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 200)
    rows = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=3))
    case = make_case(
        new_tokens=tuple(data.draw(st.sampled_from((0, 1, 1, 2, 5))) for _ in rows),
        context=tuple(rows),
        width=data.draw(st.sampled_from(gpu.WIDTHS)),
        page_size=page_size,
        num_kv_heads=data.draw(st.sampled_from((1, 2))),
        q_per_kv=data.draw(st.sampled_from((1, 3, 8, 12))),
        window=data.draw(st.sampled_from((None, 1, 17, 64, 150))),
        softcap=data.draw(st.sampled_from((None, 3.0))),
        sinks=data.draw(st.booleans()),
    )
    if not any(case.new_tokens):
        case = dataclasses.replace(case, new_tokens=(1,) * len(rows))
    dtypes = [*gpu.DTYPES, *(codes.LARGEST if page_size == gpu.BLOCK else ())]
    how = {"dtype": data.draw(st.sampled_from(dtypes)), "target": "sm_90"}
    many = case.width in gpu.EXTEND_WIDTHS and how["dtype"] in gpu.DTYPES
    if many and data.draw(st.booleans()):
        how |= {"extend": True, "splits": None}
    else:
        how |= {
            "splits": data.draw(st.sampled_from((1, 2, 4))),
            "target": data.draw(st.sampled_from(("sm_90", "sm_100"))),
        }
    got, rounded = attend(case, make_arrays(case, poison=np.nan), **how)
    np.testing.assert_allclose(got, dense_float64(case, rounded), **ATTENTION_BF16_WEIGHTS)
