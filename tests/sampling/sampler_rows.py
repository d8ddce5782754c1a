"""Turns the reference's rows into the arrays `sample` takes, all of one shape."""

import jax
import jax.numpy as jnp
import numpy as np

from inferjax.sampling import make_sampling, make_state, sample

WIDTH = 4
CONTEXT = 16
SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)

jit_sample = jax.jit(sample, static_argnames=("candidates", "top_logprobs", "vocab_size"))


def to_arrays(rows, key=None, positions=None):
    """Return logits, sampling and state; every list of ids is padded to a width of 4."""
    batch = len(rows)
    logits = np.stack([row.logits for row in rows]).astype(np.float32)
    scalars = {name: np.array([getattr(row, name) for row in rows]) for name in SCALARS}
    sampling = make_sampling(
        batch,
        **scalars,
        eos_ids=_pad([row.eos_ids for row in rows]),
        stop_ids=_pad([row.stop_ids for row in rows]),
        bias_ids=_pad([list(row.bias) for row in rows]),
        bias=_pad([list(row.bias.values()) for row in rows], fill=0.0),
        allowed_ids=_pad([row.allowed for row in rows]),
        bad_words=_pad_words([row.bad_words for row in rows]),
        num_top=[row.num_top for row in rows],
        logprob_ids=_pad([row.logprob_ids for row in rows]),
        token_mask=jnp.asarray(pack_masks(rows, logits.shape[1])),
    )
    history = np.full((batch, CONTEXT), 1, np.int32)
    for index, row in enumerate(rows):
        known = [*row.history, *row.forced]
        history[index, : len(known)] = known
    state = make_state(
        jax.random.split(jax.random.key(0) if key is None else key, batch),
        jnp.arange(batch) if positions is None else positions,
        history=jnp.asarray(history),
        history_len=np.array([len(row.history) for row in rows]),
        prompt_len=np.array([row.prompt_len for row in rows]),
        forced_len=np.array([len(row.history) + len(row.forced) for row in rows]),
    )
    return jnp.asarray(logits), sampling, state


def uniform_of(state, index):
    """Return the row's random number by the documented rule, spelled out."""
    key = jax.random.fold_in(state.key[index], state.sample_index[index])
    return float(jax.random.uniform(jax.random.fold_in(key, state.position[index])))


def pack_masks(rows, size):
    packed = np.full((len(rows), -(-size // 32)), 0xFFFFFFFF, np.uint32)
    for index, row in enumerate(rows):
        if row.token_mask is not None:
            packed[index] = 0
            for token in row.token_mask:
                packed[index, token // 32] |= np.uint32(1 << (token % 32))
    return packed


def _pad(lists, fill=-1):
    return np.array([[*ids, *[fill] * (WIDTH - len(ids))] for ids in lists])


def _pad_words(words, length=3):
    padded = np.full((len(words), WIDTH, length), -1, np.int32)
    for index, row in enumerate(words):
        for at, word in enumerate(row):
            padded[index, at, length - len(word) :] = word
    return padded
