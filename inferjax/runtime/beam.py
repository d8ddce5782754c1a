"""`beam_search`: the likeliest continuations, as one pure function for the caller's own jit."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidInput
from inferjax.kv.cache import KVCache, copy_pages, page_size_of
from inferjax.models.decoder import check_head
from inferjax.params import Params
from inferjax.runtime.arguments import (
    as_lengths,
    as_tokens,
    check_context,
    check_count,
    check_ids,
    check_kinds,
    is_concrete,
    longest,
)
from inferjax.runtime.beam_rules import (
    Beams,
    EarlyStopping,
    Rules,
    Search,
    empty_search,
    pick,
    select,
)
from inferjax.runtime.generate import prefill_prompts, share_pages
from inferjax.runtime.inputs import StepInputs
from inferjax.runtime.passes import logits_of, run_paged
from inferjax.runtime.steps import pad_id
from inferjax.sharding import automatic, rows_like
from pallas_kernels.unbatched import any_row


def beam_search(
    params: Params,
    config: ModelConfig,
    tokens: Any,
    lengths: Any = None,
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: Any = 1.0,
    early_stopping: EarlyStopping = False,
    num_return: int = 1,
    eos_ids: tuple[int, ...] | None = None,
    exec: Exec = Exec(),
) -> Beams:
    """Return the `num_return` best continuations found with W = `num_beams`, as Hugging Face does.

    In each step the W * max(2, 1 + number of end ids) likeliest continuations of a prompt's live
    beams by one token are its candidates. The W likeliest of them that do not end live on. Of the W
    first ones, those that end, by an end id or in the last step, compete for W finished places by
    score: the sum of log-probabilities / length ** `length_penalty`. When all places are taken, the
    search is over: at once with `early_stopping` True; with False, when the likeliest live beam,
    scored as if it ended now, is no better than the worst finished one; with "never", likewise, but
    scored as if it reached `max_new_tokens` for free where the penalty is positive.

    `tokens` are padded on the right, `lengths` says where each prompt ends. `eos_ids` are the
    model's by default, () for none. Prompts are prefilled once and beams share full pages; only the
    page that is being written is copied. Memory: a cache for B * (S + W * max_new_tokens) tokens.

    Raises: ShapeError, InvalidInput, RequestTooLong, UnsupportedModel.
    """
    check_kinds(params, config, exec)
    check_head(config, "vocabulary")
    tokens = as_tokens(tokens)
    lengths = as_lengths(lengths, tokens)
    check_ids(tokens, lengths, config)
    check_count("max_new_tokens", max_new_tokens, 1)
    check_context(longest(tokens, lengths) + max_new_tokens, config)
    check_count("num_beams", num_beams, 1)
    check_count("num_return", num_return, 1)
    _check_early_stopping(early_stopping)
    rules = Rules(
        num_beams=int(num_beams),
        max_new_tokens=int(max_new_tokens),
        early_stopping=early_stopping,
        eos_ids=_end_ids(config.eos_ids if eos_ids is None else eos_ids, config),
    )
    _check_beams(rules, num_return, config)
    penalty = _as_penalty(length_penalty)
    found = _beam_search(params, tokens, lengths, penalty, config=config, rules=rules, exec=exec)
    return dataclasses.replace(
        found,
        tokens=found.tokens[:, :num_return],
        logprobs=found.logprobs[:, :num_return],
        scores=found.scores[:, :num_return],
        lengths=found.lengths[:, :num_return],
    )


def _check_early_stopping(value: Any) -> None:
    if not isinstance(value, bool) and value != "never":
        raise InvalidInput(
            f"early_stopping={value!r}",
            why="it names the rule by which a search ends",
            fix='use True, False or "never"',
        )


def _end_ids(eos_ids: Any, config: ModelConfig) -> tuple[int, ...]:
    ids = tuple(eos_ids) if isinstance(eos_ids, tuple | list) else (eos_ids,)
    for i in ids:
        check_count("eos_ids", i, 0)
        if i >= config.vocab_size:
            raise InvalidInput(
                f"eos_ids={eos_ids!r}",
                why=f"the vocabulary has {config.vocab_size} ids",
                fix="give ids of this model's tokenizer, or () for none",
            )
    return tuple(dict.fromkeys(int(i) for i in ids))


def _check_beams(rules: Rules, num_return: int, config: ModelConfig) -> None:
    if num_return > rules.num_beams:
        raise InvalidInput(
            f"num_return={num_return} with num_beams={rules.num_beams}",
            why="a search ends with one continuation per beam",
            fix="return fewer, or search with more beams",
        )
    if rules.num_candidates > config.vocab_size:
        raise InvalidInput(
            f"num_beams={rules.num_beams} with {len(rules.eos_ids)} end ids",
            why=f"the first step has {rules.num_candidates} candidates, of {config.vocab_size} ids",
            fix="search with fewer beams",
        )


def _as_penalty(value: Any) -> Float[Array, ""]:
    if isinstance(value, jax.Array):
        good = value.shape == () and not (is_concrete(value) and not math.isfinite(value))
    else:
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        good = number and math.isfinite(value)
    if not good:
        raise InvalidInput(
            f"length_penalty={value!r}",
            why="it is the power of the length by which a sum of log-probabilities is divided",
            fix="give a finite number: 0 compares sums, 1 means, and more favours long ones",
        )
    return jnp.asarray(value, jnp.float32)


@jax.jit(static_argnames=("config", "rules", "exec"))
@automatic(lambda _, tokens, *__: rows_like(tokens))
def _beam_search(
    params: Params,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    length_penalty: Float[Array, ""],
    *,
    config: ModelConfig,
    rules: Rules,
    exec: Exec,
) -> Beams:
    num_beams, num_steps = rules.num_beams, rules.max_new_tokens
    logits, status, cache, prompt_table = prefill_prompts(
        params, config, tokens, lengths, num_beams, num_steps, exec
    )
    logits = jnp.repeat(logits, num_beams, axis=0)
    cache, own = share_pages(cache, prompt_table, lengths, num_beams, num_steps)

    def more(carry: tuple[Array, Search, KVCache, Array]) -> Array:
        return (carry[0] < num_steps) & any_row(carry[1].open)

    def step(carry: tuple[Array, Search, KVCache, Array]):
        i, search, cache, table = carry
        starts = jnp.repeat(lengths, num_beams) + i - 1
        cache, table = _reorder(cache, table, own, search.parents, starts)
        newest = lax.dynamic_index_in_dim(search.tokens, i - 1, 2, keepdims=False)
        inputs = StepInputs(
            tokens=newest.reshape(-1, 1),
            lengths=jnp.repeat(search.open.astype(jnp.int32), num_beams),
            starts=starts,
            block_tables=(table,) * len(cache.groups),
        )
        hidden, cache, _ = run_paged(params, config, cache, inputs, exec)
        logits = logits_of(params, config, hidden[:, 0], exec)
        search = select(i, logits, search, length_penalty, rules, exec)
        return i + 1, search, cache, table

    search = empty_search(status, rules, pad_id(config))
    search = select(jnp.int32(0), logits, search, length_penalty, rules, exec)
    _, search, _, _ = lax.while_loop(more, step, (jnp.int32(1), search, cache, own))
    return search.ended


def _reorder(
    cache: KVCache,
    table: Int[Array, "R M"],
    own: Int[Array, "R M"],
    parents: Int[Array, "B W"],
    starts: Int[Array, " R"],
) -> tuple[KVCache, Int[Array, "R M"]]:
    """Give every live beam its parent's pages, with a copy of the one that is written next.

    A beam writes its page j, one of its `own`, only while that is the newest one, and until then no
    other beam refers to it. Full pages are never written again, so they are shared.
    """
    batch, num_beams = parents.shape
    first = jnp.arange(batch, dtype=jnp.int32)[:, None] * num_beams
    parent = (first + parents).reshape(-1)
    newest = (starts // page_size_of(cache))[:, None]
    page = jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    target = pick(own, newest)[:, 0]
    cache = copy_pages(cache, target[parent], target)
    return cache, jnp.where(page < newest, table[parent], own)
