"""Runs prompts through `extend` and `decode` in every layout that must not change the result.

Pages come in shuffled order from pools full of NaN, the trash page included, so that a page read by
mistake shows at once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import padded

import inferjax as ij
from inferjax.checkpoint.load import Model
from inferjax.config import cache_groups
from inferjax.kv.cache import KVCache
from inferjax.sampling import NO_LIMIT, SampleState

DEFAULT = ij.Exec()
HISTORY = 64  # ids a row may remember: the longest prompt of these tests and what follows it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything about a run that must not matter.

    slots: the row of each prompt among `num_rows`; mates: how many of the other rows run too.
    chunk: prompt tokens per `extend`. steps: tokens per `decode`. seed: the order of the pages.
    """

    num_rows: int = 3
    slots: tuple[int, ...] = (0, 1, 2)
    mates: bool = True
    chunk: int = 8
    steps: int = 4
    page_size: int = 8
    seed: int = 0


def poisoned_cache(model: Model, num_pages: int, exec: ij.Exec) -> KVCache:
    """Return a cache whose every value is NaN; codes, which cannot be, have factors that are."""
    cache = ij.init_cache(model.config, num_pages=num_pages, exec=exec)
    return jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 127), cache
    )


def shuffled_tables(
    model: Model, num_rows: int, per_row: int, num_pages: int, seed: int
) -> tuple[np.ndarray, ...]:
    """Return a block table per cache group, every group with an order of its own."""
    rng = np.random.default_rng(seed)
    ids = np.arange(1, num_pages)
    return tuple(
        rng.permutation(ids)[: num_rows * per_row].reshape(num_rows, per_row).astype(np.int32)
        for _ in cache_groups(model.config)
    )


def extend_chunks(
    model: Model,
    cache: KVCache,
    tables: Sequence[np.ndarray],
    rows: list[np.ndarray],
    chunk: int,
    exec: ij.Exec,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, KVCache]:
    """Append each row's tokens, `chunk` a call; return the logits after every token [B, S, V]."""
    starts = np.zeros(len(rows), np.int32) if starts is None else starts
    lengths = np.array([len(row) for row in rows])
    num_chunks = max(1, -(-int(lengths.max()) // chunk))
    tokens = padded(rows, num_chunks * chunk)
    logits = []
    for i in range(num_chunks):
        inputs = ij.make_inputs(
            tokens[:, i * chunk : (i + 1) * chunk],
            lengths=np.clip(lengths - i * chunk, 0, chunk),
            starts=starts + i * chunk,
            block_tables=tables,
        )
        out, cache = ij.extend(model.params, model.config, cache, inputs, outputs="all", exec=exec)
        assert not np.asarray(out.status).any()
        logits.append(np.asarray(out.values))
    return np.concatenate(logits, axis=1), cache


def first_state(
    rows: list[np.ndarray], tables: Sequence[Any], sampling: ij.Sampling, keys: jax.Array
) -> ij.DecodeState:
    """Return the state of rows whose prompt, but for its last token, is in the cache."""
    lengths = jnp.array([len(row) for row in rows], jnp.int32)
    alive = lengths > 0
    sample = SampleState(
        key=keys,
        sample_index=jnp.zeros_like(lengths),
        position=lengths,
        history=jnp.asarray(padded(rows, HISTORY)),
        history_len=lengths,
        prompt_len=lengths,
        forced_len=jnp.zeros_like(lengths),
    )
    return ij.DecodeState(
        tokens=jnp.array([row[-1] if len(row) else 0 for row in rows], jnp.int32),
        done=~alive,
        sample=sample,
        sampling=sampling,
        block_tables=tuple(jnp.asarray(t) for t in tables),
    )


def decode_all(
    model: Model, cache: KVCache, state: ij.DecodeState, total: int, steps: int, exec: ij.Exec
) -> tuple[np.ndarray, np.ndarray, ij.DecodeState, KVCache]:
    """Decode `total` tokens, `steps` a call; return tokens and log-probabilities [B, total]."""
    tokens, logprobs = [], []
    for _ in range(total // steps):
        out, state, cache = ij.decode(
            model.params, model.config, cache, state, steps=steps, exec=exec
        )
        assert not np.asarray(out.status).any()
        tokens.append(np.asarray(out.values.tokens))
        logprobs.append(np.asarray(out.values.logprobs))
    return np.concatenate(tokens, 1), np.concatenate(logprobs, 1), state, cache


def run_layout(
    model: Model,
    prompts: list[np.ndarray],
    layout: Layout,
    *,
    total: int,
    sampling: dict[str, Any],
    exec: ij.Exec = DEFAULT,
    keys: Sequence[int] = (0, 1, 2),
    sample_index: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Continue `prompts` by `total` tokens; return tokens and log-probabilities [prompts, total].

    `sampling` and `keys` have one value a prompt, whatever its slot.
    """
    exec = dataclasses.replace(exec, page_size=layout.page_size)
    per_row = -(-HISTORY // layout.page_size)
    num_pages = 1 + (layout.num_rows + 1) * per_row
    tables = shuffled_tables(model, layout.num_rows, per_row, num_pages, layout.seed)
    rows, order = _place(model, prompts, layout)
    cache = poisoned_cache(model, num_pages, exec)
    heads = [row[:-1] for row in rows]
    _, cache = extend_chunks(model, cache, tables, heads, layout.chunk, exec)
    spread = {name: np.asarray(value)[order] for name, value in sampling.items()}
    settings = ij.make_sampling(layout.num_rows, max_tokens=NO_LIMIT, **spread)
    state = first_state(rows, tables, settings, keys_of(np.asarray(keys)[order]))
    index = jnp.full_like(state.sample.sample_index, sample_index)
    state = state.replace(sample=state.sample.replace(sample_index=index))
    tokens, logprobs, _, _ = decode_all(model, cache, state, total, layout.steps, exec)
    slots = list(layout.slots[: len(prompts)])
    return tokens[slots], logprobs[slots]


def keys_of(seeds: Sequence[int] | np.ndarray) -> jax.Array:
    """Return one random key a seed."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


def _place(
    model: Model, prompts: list[np.ndarray], layout: Layout
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return every row's prompt, and which prompt's settings it has; mates get random ones."""
    rng = np.random.default_rng(layout.seed + 100)
    vocab = model.config.vocab_size
    lengths = rng.integers(1, 20, layout.num_rows) if layout.mates else [0] * layout.num_rows
    rows = [rng.integers(3, vocab, n) for n in lengths]
    order = rng.integers(0, len(prompts), layout.num_rows)
    for i, prompt in enumerate(prompts):
        rows[layout.slots[i]], order[layout.slots[i]] = prompt, i
    return rows, order
