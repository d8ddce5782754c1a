"""What the sampler reads and returns: pytrees of arrays with one row per sequence.

Values are arrays, so that changing one never recompiles. Lists of ids are padded with -1, and an
axis of length 0 means that no row uses the feature, which then costs nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32
from jaxtyping import Bool as BoolArray

from inferjax.errors import ShapeError
from inferjax.pytree import pytree

NO_LIMIT = int(np.iinfo(np.int32).max)

# Temperatures below this are greedy, as in vLLM.
GREEDY_BELOW = 1e-5


@pytree
class Sampling:
    """How each row's next token is chosen.

    A temperature below 1e-5 is greedy and switches the filters off. `top_k <= 0` is off. `eos_ids`
    are the model's, `stop_ids` the request's. A row of `allowed_ids` with no id is unrestricted.
    The last token of each `bad_words` sequence (padded on the left) is banned where the others end
    the row's context. `num_top` is how many of the most likely tokens the row reports, of the
    static number that `sample` is asked for; `logprob_ids` are ids whose log-probabilities it
    reports. A set bit of `token_mask`, 32 ids a word from the lowest bit, allows the id.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    min_tokens: Int[Array, " B"]
    max_tokens: Int[Array, " B"]
    ignore_eos: BoolArray[Array, " B"]
    eos_ids: Int[Array, "B E0"]
    stop_ids: Int[Array, "B E1"]
    bias_ids: Int[Array, "B J"]
    bias: Float[Array, "B J"]
    allowed_ids: Int[Array, "B A"]
    bad_words: Int[Array, "B W Lw"]
    num_top: Int[Array, " B"]
    logprob_ids: Int[Array, "B Q"]
    token_mask: UInt32[Array, "B M"] | None = None


@pytree
class SampleState:
    """Where each row stands.

    `position` is the sequence position of the token about to be drawn. `history` holds prompt and
    output ids; entries from `history_len` on are ignored. Its length may be 0 where no row uses
    penalties or sequences of bad words. Up to `forced_len` the ids in `history` are prescribed:
    where `history_len` is below it, the token at that place is taken instead of a drawn one.
    """

    key: Key[Array, " B"]
    sample_index: Int[Array, " B"]
    position: Int[Array, " B"]
    history: Int[Array, "B C"]
    history_len: Int[Array, " B"]
    prompt_len: Int[Array, " B"]
    forced_len: Int[Array, " B"]


@pytree
class Sampled:
    """One token per row.

    `logprobs`, `top_logprobs` and `chosen_logprobs` are raw: log-softmax of the untouched float32
    logits, as scoring gives. `sampled_logprobs` are under the distribution the token was drawn
    from; 0.0 for greedy rows, whose distribution is all on one token, and -inf for a forced token
    that could not have been drawn. Beyond the row's `num_top` the top ids are -1; the value of such
    an id is 0. `status` holds `Status` bits; a row with a bit set still has a token
    inside the vocabulary.
    """

    tokens: Int[Array, " B"]
    logprobs: Float[Array, " B"]
    sampled_logprobs: Float[Array, " B"]
    top_ids: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]
    chosen_logprobs: Float[Array, "B Q"]
    status: Int[Array, " B"]


type Values = float | int | bool | Array | np.ndarray | np.generic | tuple | list


def make_sampling(
    batch: int,
    *,
    temperature: Values = 1.0,
    top_k: Values = 0,
    top_p: Values = 1.0,
    min_p: Values = 0.0,
    repetition_penalty: Values = 1.0,
    presence_penalty: Values = 0.0,
    frequency_penalty: Values = 0.0,
    min_tokens: Values = 0,
    max_tokens: Values = NO_LIMIT,
    ignore_eos: Values = False,
    eos_ids: Values = (),
    stop_ids: Values = (),
    bias_ids: Values = (),
    bias: Values = (),
    allowed_ids: Values = (),
    bad_words: Values = (),
    num_top: Values = NO_LIMIT,
    logprob_ids: Values = (),
    token_mask: Array | None = None,
) -> Sampling:
    """Build `Sampling` from scalars, arrays or tracers, spread over `batch` rows with fixed dtypes.

    Lists of ids may lack the batch axis. Nothing is checked here: `sample` reports bad values by
    status.
    """
    f32, i32 = jnp.float32, jnp.int32
    words = jnp.asarray(bad_words, i32)
    return Sampling(
        temperature=_rows(temperature, batch, f32, 1),
        top_k=_rows(top_k, batch, i32, 1),
        top_p=_rows(top_p, batch, f32, 1),
        min_p=_rows(min_p, batch, f32, 1),
        repetition_penalty=_rows(repetition_penalty, batch, f32, 1),
        presence_penalty=_rows(presence_penalty, batch, f32, 1),
        frequency_penalty=_rows(frequency_penalty, batch, f32, 1),
        min_tokens=_rows(min_tokens, batch, i32, 1),
        max_tokens=_rows(max_tokens, batch, i32, 1),
        ignore_eos=_rows(ignore_eos, batch, jnp.bool_, 1),
        eos_ids=_rows(eos_ids, batch, i32, 2),
        stop_ids=_rows(stop_ids, batch, i32, 2),
        bias_ids=_rows(bias_ids, batch, i32, 2),
        bias=_rows(bias, batch, f32, 2),
        allowed_ids=_rows(allowed_ids, batch, i32, 2),
        bad_words=_rows(words if words.size else words.reshape(0, 1), batch, i32, 3),
        num_top=_rows(num_top, batch, i32, 1),
        logprob_ids=_rows(logprob_ids, batch, i32, 2),
        token_mask=token_mask,
    )


def make_state(
    key: Array,
    position: Values,
    *,
    sample_index: Values = 0,
    history: Array | None = None,
    history_len: Values = 0,
    prompt_len: Values = 0,
    forced_len: Values = 0,
) -> SampleState:
    """Build `SampleState` from `[B]` keys; the other values are spread over the rows."""
    batch, i32 = key.shape[0], jnp.int32
    return SampleState(
        key=key,
        sample_index=_rows(sample_index, batch, i32, 1),
        position=_rows(position, batch, i32, 1),
        history=jnp.zeros((batch, 0), i32) if history is None else history,
        history_len=_rows(history_len, batch, i32, 1),
        prompt_len=_rows(prompt_len, batch, i32, 1),
        forced_len=_rows(forced_len, batch, i32, 1),
    )


def greedy_rows(sampling: Sampling) -> BoolArray[Array, " B"]:
    """Return which rows take the most likely token."""
    return sampling.temperature < GREEDY_BELOW


def forced_tokens(state: SampleState) -> Int[Array, " B"]:
    """Return the token that is prescribed for each row, -1 where one is to be drawn."""
    length = state.history.shape[1]
    if length == 0:
        return jnp.full(state.history_len.shape, -1, jnp.int32)
    rows = jnp.arange(state.history.shape[0], dtype=jnp.int32)
    token = state.history[rows, jnp.minimum(state.history_len, length - 1)]
    return jnp.where(state.history_len < jnp.minimum(state.forced_len, length), token, -1)


def num_generated(state: SampleState) -> Int[Array, " B"]:
    """Return how many output tokens each row has so far."""
    return state.history_len - state.prompt_len


def stopped(
    tokens: Int[Array, " B"], sampling: Sampling, num_generated: Int[Array, " B"]
) -> BoolArray[Array, " B"]:
    """Return which rows end with these tokens: an EOS id, unless ignored, or a stop id.

    `num_generated` counts `tokens` themselves; nothing ends a row within its first `min_tokens`.
    """
    at_eos = jnp.any(tokens[:, None] == sampling.eos_ids, axis=1) & ~sampling.ignore_eos
    at_stop = jnp.any(tokens[:, None] == sampling.stop_ids, axis=1)
    return (at_eos | at_stop) & (num_generated > sampling.min_tokens)


def _rows(value: Values, batch: int, dtype: jax.typing.DTypeLike, ndim: int) -> Array:
    array = jnp.asarray(value, dtype)
    array = array if array.ndim == ndim else jnp.expand_dims(array, 0)
    if array.ndim != ndim or array.shape[0] not in (1, batch):
        raise ShapeError(
            f"a sampling value has shape {list(array.shape)}",
            why=f"there are {batch} rows",
            fix="give one value for all rows, or one per row",
        )
    return jnp.broadcast_to(array, (batch, *array.shape[1:]))
