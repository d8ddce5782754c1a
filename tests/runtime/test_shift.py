"""Cached tokens that move to earlier positions: their keys turn, everything else stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_runs import DEFAULT, extend_chunks, poisoned_cache
from tiny_models import prompts_of, tiny_model

import inferjax as ij
from inferjax.config import LatentAttention, Rope, cache_groups
from inferjax.layers.rope import inverse_frequencies, rotate, rotation, turn
from inferjax.runtime.shift import shift_pages

FAMILIES = ("llama", "llama_yarn", "gemma3_text", "gpt_oss", "deepseek_v3")
ROPES = {
    "plain": Rope(theta=1e4, dim=16),
    "partial": Rope(theta=1e4, dim=8),
    "llama3": Rope(theta=5e5, dim=16, scaling="llama3", factor=8.0, original_context=64),
    "yarn": Rope(theta=1e4, dim=16, scaling="yarn", factor=4.0, original_context=64),
    "longrope": Rope(
        theta=1e4,
        dim=16,
        scaling="longrope",
        factor=4.0,
        original_context=64,
        max_context=256,
        long_factor=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
        short_factor=(1.0,) * 8,
    ),
}
SIZE, FIRST, DROPPED, TOTAL = 8, 1, 3, 7  # in pages: the sinks, what goes, all there is


@pytest.mark.parametrize("name", ROPES)
def test_a_turned_key_is_the_key_at_the_earlier_position(name, rng):
    x = jnp.asarray(rng.normal(size=(1, 40, 2, 16)), jnp.float32)
    positions = jnp.arange(100, 140, dtype=jnp.int32)[None]
    moved = turn(rotate(x, rotation(positions, ROPES[name])), -96, ROPES[name])
    want = rotate(x, rotation(positions - 96, ROPES[name]))
    np.testing.assert_allclose(moved, want, atol=2e-5)


def filled(family: str) -> tuple[ij.KVCache, np.ndarray]:
    """Return a cache whose pages 1 to TOTAL hold a prompt, and the prompt."""
    model = tiny_model(family)
    (prompt,) = prompts_of(model, (TOTAL * SIZE,))
    return extended(family, prompt), prompt


def extended(family: str, tokens: np.ndarray) -> ij.KVCache:
    model, exec = tiny_model(family), ij.Exec(page_size=SIZE)
    cache = poisoned_cache(model, TOTAL + 3, exec)
    table = np.arange(1, TOTAL + 1, dtype=np.int32)[None]
    tables = [table for _ in cache_groups(model.config)]
    return extend_chunks(model, cache, tables, [tokens], len(tokens), DEFAULT)[1]


def shifted(family: str, cache: ij.KVCache, sources: list[int], targets: list[int]) -> ij.KVCache:
    config, padding = tiny_model(family).config, [0] * (TOTAL - len(sources))
    groups = range(len(cache.groups))
    return shift_pages(
        jax.tree.map(jnp.copy, cache),
        tuple(np.array(sources + padding, np.int32) for _ in groups),
        tuple(np.array(targets + padding, np.int32) for _ in groups),
        config=config,
        distance=DROPPED * SIZE,
    )


KEPT = list(range(1 + FIRST + DROPPED, TOTAL + 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_equal_a_prefill_of_the_kept_tokens(family):
    """Where no earlier token has left a trace, moved keys are those of the shortened text."""
    config = tiny_model(family).config
    cache, prompt = filled(family)
    moved = shifted(family, cache, KEPT, KEPT)
    short = np.concatenate([prompt[: FIRST * SIZE], prompt[(FIRST + DROPPED) * SIZE :]])
    wanted = extended(family, short)
    group = config.layers[0].group
    here = np.asarray(moved.groups[group].values[0, KEPT])
    there = np.asarray(wanted.groups[group].values[0, 1 + FIRST : 1 + TOTAL - DROPPED])
    np.testing.assert_allclose(here, there, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_turns_by_its_own_frequencies(family):
    config = tiny_model(family).config
    cache, _ = filled(family)
    moved = shifted(family, cache, KEPT, KEPT)
    counts = [0] * len(cache.groups)
    for spec in config.layers:
        attention, layer = spec.attention, counts[spec.group]
        counts[spec.group] += 1
        before = np.asarray(cache.groups[spec.group].values[layer, KEPT], np.float64)
        first = attention.kv_rank if isinstance(attention, LatentAttention) else 0
        wanted = before.copy()
        if attention.rope is not None:
            part = slice(first, first + attention.rope.dim)
            wanted[:, :, 0, :, part] = turned_back(before[:, :, 0, :, part], attention.rope)
        np.testing.assert_allclose(moved.groups[spec.group].values[layer, KEPT], wanted, atol=1e-5)


def turned_back(keys: np.ndarray, rope: Rope) -> np.ndarray:
    half = keys.shape[-1] // 2
    angles = DROPPED * SIZE * inverse_frequencies(rope)[0].astype(np.float64)
    found = (keys[..., :half] + 1j * keys[..., half:]) * np.exp(-1j * angles)
    return np.concatenate([found.real, found.imag], axis=-1)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_pages_may_move_to_others_and_nothing_else_is_touched(family):
    cache, _ = filled(family)
    in_place = shifted(family, cache, KEPT, KEPT)
    spare = [TOTAL + 1, *KEPT[1:]]
    moved = shifted(family, cache, KEPT, spare)
    for pool, there, before in zip(*map(jax.tree.leaves, (moved, in_place, cache)), strict=True):
        np.testing.assert_array_equal(pool[:, spare], there[:, KEPT])
        rest = [page for page in range(pool.shape[1]) if page not in spare]
        np.testing.assert_array_equal(pool[:, rest], before[:, rest])


def test_a_shift_makes_no_copy_of_the_cache():
    config = tiny_model("llama").config
    cache = ij.init_cache(config, num_pages=2000, exec=ij.Exec(page_size=SIZE))
    pages = (np.zeros(4, np.int32),)
    lowered = shift_pages.lower(cache, pages, pages, config=config, distance=SIZE)
    assert (
        lowered.compile().memory_analysis().temp_size_in_bytes < cache.groups[0].values.nbytes / 20
    )
