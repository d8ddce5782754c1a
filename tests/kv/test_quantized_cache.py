"""A cache in eight bits: what is written, read, copied and turned, and what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import SMALL
from paged_runs import extend_chunks, poisoned_cache, shuffled_tables
from tiny_models import padded, prompts_of, tiny_model
from tolerances import LOGITS_F32

import inferjax as ij
from inferjax.config import cache_groups
from inferjax.engine.sizes import make_sizes
from inferjax.errors import ShapeError, UnsupportedConfig
from inferjax.kv import cache as kv
from inferjax.layers import context
from inferjax.runtime.shift import shift_pages
from inferjax.sampling import Status
from pallas_kernels.paged_attention import codes
from pallas_kernels.paged_attention.hadamard import spread

KINDS = ("int8", "float8_e4m3fn")
FAMILIES = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
LENGTHS = (5, 8, 20)


def run(family: str, exec: ij.Exec, chunk: int, *, seed: int = 0, break_page: bool = False):
    """Extend three rows in chunks; return their logits, and the cache's live pages in order."""
    model = tiny_model(family)
    rows = prompts_of(model, LENGTHS)
    tables = shuffled_tables(model, 3, 3, 12, seed=seed)
    cache = poisoned_cache(model, 12, exec)
    logits, cache = extend_chunks(model, cache, tables, rows, chunk, exec)
    pages = [
        np.asarray(leaf[:, table[2, 0]].astype(jnp.float32))
        for pool, table in zip(cache.groups, tables, strict=True)
        for leaf in jax.tree.leaves(pool)
    ]
    return [logits[i, :n] for i, n in enumerate(LENGTHS)], pages


@pytest.mark.parametrize(
    ("family", "kind", "attention"),
    [
        ("llama", "int8", "auto"),
        ("deepseek_v3", "float8_e4m3fn", "xla"),
        pytest.param("gpt_oss", "int8", "xla", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "float8_e4m3fn", "auto", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "int8", "auto", marks=pytest.mark.slow),
    ],
)
def test_exact_mode_does_not_see_how_a_prompt_is_cut(family, kind, attention):
    """Tokens of a chunk read each other as the cache holds them, not as they were computed."""
    exec = ij.Exec(page_size=8, exact=True, kv_dtype=kind, attention=attention)
    known, known_pages = run(family, exec, 20)
    for chunk, seed in ((3, 1), (8, 2)):
        logits, pages = run(family, exec, chunk, seed=seed)
        for ours, theirs in zip([*logits, *pages], [*known, *known_pages], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "int8"),
        ("deepseek_v3", "int8"),
        ("gpt_oss", "float8_e4m3fn"),
        pytest.param("gemma3_text", "int8", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
def test_a_step_computes_with_the_rounded_keys_and_values(monkeypatch, family, kind):
    """The oracle: a float32 cache into which rounded numbers are written."""
    ours, _ = run(family, ij.Exec(page_size=8, kv_dtype=kind, attention="reference"), 8)

    def write_rounded(pool, layer, new, *place, value_dim, implementation):
        turned = kv.is_turned(filled(family, kind).groups[0])
        new = with_turned_keys(new) if turned else new
        encoded = codes.encode(new, kv.CODES[kind], value_dim=value_dim)
        new = codes.decode(*encoded, value_dim=value_dim)
        new = with_turned_keys(new) if turned else new
        return kv.write(pool, layer, new, *place, value_dim=value_dim)

    monkeypatch.setattr(context, "write", write_rounded)
    # A setting that no other test has: the program must not be one compiled before.
    exec = ij.Exec(page_size=8, attention="reference", candidates=199)
    for got, known in zip(ours, run(family, exec, 8)[0], strict=True):
        np.testing.assert_allclose(got, known, **LOGITS_F32)


def with_turned_keys(tokens: jax.Array) -> jax.Array:
    return tokens.at[..., 0, :].set(spread(tokens[..., 0, :]))


def filled(family: str, kind: str, num_pages: int = 6) -> ij.KVCache:
    """Return a cache with something everywhere."""
    model = tiny_model(family)
    cache = ij.init_cache(
        model.config, num_pages=num_pages, exec=ij.Exec(page_size=4, kv_dtype=kind)
    )
    rng = np.random.default_rng(0)
    groups = []
    for pool, group in zip(cache.groups, cache_groups(model.config), strict=True):
        shape = pool.values.shape
        new = jnp.asarray(rng.standard_normal(shape), jnp.float32).swapaxes(3, 4)
        values, factors = codes.encode(new, pool.values.dtype.name, value_dim=value_dim(group))
        groups.append(kv.Pages(values=values.swapaxes(3, 4), factors=factors.swapaxes(3, 4)))
    return kv.KVCache(groups=tuple(groups))


def value_dim(group) -> int:
    return 16 if group.planes == 1 else group.width


def decoded(pool: kv.Pages, dim: int) -> np.ndarray:
    tokens = codes.decode(pool.values.swapaxes(3, 4), pool.factors.swapaxes(3, 4), value_dim=dim)
    return np.asarray(tokens.swapaxes(3, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_take_codes_and_factors(kind):
    cache = filled("gemma3_text", kind)
    source, target = jnp.array([3, 5, 2]), jnp.array([4, 0, 1])
    whole = kv.copy_pages(cache, source, target)
    one = kv.copy_group_pages(cache, source, target, group=1)
    for index, (before, all_, single) in enumerate(
        zip(cache.groups, whole.groups, one.groups, strict=True)
    ):
        for old, new, part in zip(*map(jax.tree.leaves, (before, all_, single)), strict=True):
            known = np.array(old.astype(jnp.float32))
            unchanged = known.copy()
            known[:, [4, 1]] = known[:, [3, 2]]
            np.testing.assert_array_equal(new.astype(jnp.float32), known)
            np.testing.assert_array_equal(
                part.astype(jnp.float32), known if index == 1 else unchanged
            )


def straightened(pool: np.ndarray) -> np.ndarray:
    """Turn keys [L, P, K, C, S, W] back, or once more."""
    return np.asarray(with_turned_keys(jnp.asarray(pool).swapaxes(3, 4)).swapaxes(3, 4))


@pytest.mark.parametrize(("family", "kind"), [("llama", "int8"), ("deepseek_v3", "float8_e4m3fn")])
def test_turned_keys_are_rounded_once_more_and_nothing_else_is(family, kind):
    config = tiny_model(family).config
    cache = filled(family, kind)
    group = cache_groups(config)[0]
    dim = config.layers[0].attention.kv_rank if group.planes == 1 else group.width
    straight = (lambda x: x) if group.planes == 1 else straightened
    floats = kv.KVCache(
        groups=(kv.Pages(values=jnp.asarray(straight(decoded(cache.groups[0], dim)))),)
    )
    pages = (np.array([3, 4, 0], np.int32),), (np.array([3, 5, 0], np.int32),)
    given = jax.tree.map(jnp.copy, cache)
    moved = shift_pages(given, *pages, config=config, distance=8).groups[0]
    want = straight(
        np.asarray(shift_pages(floats, *pages, config=config, distance=8).groups[0].values)
    )
    found, before = decoded(moved, dim), decoded(cache.groups[0], dim)
    step = 1 / 127 if kind == "int8" else 1 / 8
    for page in (3, 5):
        peak = np.abs(want[:, page]).max(-1, keepdims=True)
        assert (np.abs(found[:, page] - want[:, page]) <= 0.51 * step * peak).all()
        source = {3: 3, 5: 4}[page]
        values = (slice(None), slice(None), -1, slice(None), slice(dim))
        np.testing.assert_array_equal(found[:, page][values], before[:, source][values])
    np.testing.assert_array_equal(found[:, [0, 1, 2, 4]], before[:, [0, 1, 2, 4]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_whose_cache_is_not_finite_says_so_and_harms_nobody(kind):
    model, exec = tiny_model("llama"), ij.Exec(page_size=8, kv_dtype=kind, attention="xla")
    tables = shuffled_tables(model, 3, 3, 12, seed=3)
    rows = prompts_of(model, LENGTHS)

    def step(damage: bool):
        _, cache = extend_chunks(model, poisoned_cache(model, 12, exec), tables, rows, 20, exec)
        if damage:
            factors = cache.groups[0].factors.at[1, tables[0][1, 0], 0, 0, 2].set(jnp.nan)
            cache = kv.KVCache(groups=(cache.groups[0].replace(factors=factors),))
        inputs = ij.make_inputs(
            padded([row[:1] for row in rows], 1), starts=np.array(LENGTHS), block_tables=tables
        )
        out, _ = ij.extend(model.params, model.config, cache, inputs, exec=exec)
        return np.asarray(out.values), np.asarray(out.status)

    known, _ = step(damage=False)
    found, status = step(damage=True)
    assert status.tolist() == [0, int(Status.NAN_LOGITS), 0]
    np.testing.assert_array_equal(found[[0, 2]], known[[0, 2]])


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_token_takes_a_byte_a_number_and_four_a_head(family):
    config = tiny_model(family).config
    groups = cache_groups(config)
    numbers = sum(g.num_layers * g.num_kv_heads * g.planes * g.width for g in groups)
    factors = sum(g.num_layers * g.num_kv_heads * 2 for g in groups)
    for kind in KINDS:
        assert kv.token_bytes(config, kind) == numbers + 2 * factors
        cache = ij.init_cache(config, num_pages=3, exec=ij.Exec(page_size=8, kv_dtype=kind))
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
        assert total == 3 * 8 * kv.token_bytes(config, kind)
        assert kv.dtype_of(cache) == kind


def test_the_same_memory_holds_more_pages():
    model = tiny_model("llama")
    config = dataclasses.replace(SMALL, num_pages=None, cache_bytes=40_000)
    pages = {
        kind: make_sizes(model, config, ij.Exec(page_size=8, kv_dtype=kind)).num_pages[0] - 1
        for kind in ("float32", *KINDS)
    }
    ratio = kv.token_bytes(model.config, "float32") / kv.token_bytes(model.config, "int8")
    assert pages["int8"] == pages["float8_e4m3fn"]
    assert abs(pages["int8"] - ratio * pages["float32"]) <= ratio + 1


def test_a_short_name_is_the_same_setting():
    assert ij.Exec(kv_dtype="fp8") == ij.Exec(kv_dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedConfig, match="int8, float8_e4m3fn"):
        ij.Exec(kv_dtype="int4")


def test_codes_without_their_factors_are_refused():
    model, exec = tiny_model("llama"), ij.Exec(page_size=8, kv_dtype="int8")
    cache = ij.init_cache(model.config, num_pages=4, exec=exec)
    inputs = ij.make_inputs([[1, 2, 3]], block_tables=[np.array([[1]])])
    pool = cache.groups[0]
    for wrong in (pool.replace(factors=None), pool.replace(factors=pool.factors[:, :2])):
        with pytest.raises(ShapeError, match="pools"):
            ij.extend(model.params, model.config, kv.KVCache(groups=(wrong,)), inputs, exec=exec)
