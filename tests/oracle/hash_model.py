"""A decoder whose numbers are hashes, layer by layer like a real one.

A layer's key is a hash of the token's hidden value, attention is a hash of all visible keys and
where they are, and the next token is a hash of the last hidden value, the history, the request's
parameters and its randomness. Every formula works on Python's integers and on uint64 arrays: the
truth in `expected.py` uses the former without any pages, the programs in `oracle.py` the latter.
"""

import dataclasses
import functools
from collections.abc import Sequence

from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, Norm, assign_groups
from inferjax.sampling import NO_LIMIT, SamplingParams
from inferjax.sampling.arrays import GREEDY_BELOW

MASK = (1 << 64) - 1
_A, _B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def config_of(
    windows: Sequence[int | None],
    *,
    vocab_size: int = 61,
    max_context: int = 128,
    eos_ids: tuple[int, ...] = (2,),
) -> ModelConfig:
    """Return the facts of a model with one layer per window (None: full attention)."""
    layers = [
        LayerSpec(
            attention=Attention(
                num_q_heads=1, num_kv_heads=1, head_dim=4, scale=1.0, window=window
            ),
            ffn=MLP(ffn_dim=4),
            norm=Norm(),
        )
        for window in windows
    ]
    return ModelConfig(
        family="oracle",
        vocab_size=vocab_size,
        model_dim=4,
        max_context=max_context,
        layers=assign_groups(tuple(layers)),
        final_norm=Norm(),
        tied=True,
        eos_ids=eos_ids,
    )


def mix(x):
    """Scramble 64 bits."""
    x = ((x ^ (x >> 32)) * _B) & MASK
    return x ^ (x >> 29)


def join(a, b):
    """Hash a pair; the order matters."""
    return mix((a * _A + b) & MASK)


# A number for every position.
SPOTS = [mix(position * _A & MASK) for position in range(1, 1 << 12)]


def at_spot(value, spot):
    """Hash what is at a position: a sum of these forgets neither values nor positions."""
    return mix((value + spot) & MASK)


def turned(key):
    """Return the key of a token that has moved back."""
    return join(key, 1_000_033)


def seed_of(hidden, history, prompt_len, rules):
    """Return what decides the next token but for the randomness."""
    return join(join(join(hidden, history), prompt_len), rules)


def randomized(seed, key, sample_index, position):
    """Add the randomness of rows that are not greedy."""
    return join(join(join(seed, key), sample_index), position)


def candidate(seed, rank: int, vocab_size: int):
    """Return the id that is drawn if those of lower ranks are banned."""
    return (join(seed, rank) >> 20) % vocab_size


def top_id(hidden, rank: int, vocab_size: int):
    """Return the id that is reported as the most likely but `rank`."""
    return (join(hidden, rank + 1_000_003) >> 20) % vocab_size


def logprob(seed, token):
    """Return a number in (-16, 0] that float32 holds exactly."""
    return (join(seed, token) >> 48) / -4096.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a request's parameters mean to this model."""

    number: int
    greedy: bool
    min_tokens: int
    max_tokens: int
    stops: frozenset[int]
    banned: frozenset[int]


@functools.lru_cache(maxsize=4096)
def rules_of(sampling: SamplingParams, eos_ids: tuple[int, ...]) -> Rules:
    """Return the rules; `banned` ids cannot be drawn before `min_tokens`."""
    number = 0
    for field in (sampling.temperature, sampling.top_p, sampling.presence_penalty + 2):
        number = join(number, int(field * 1000))
    own = frozenset(sampling.stop_token_ids)
    return Rules(
        number=join(number, sampling.top_k & MASK),
        greedy=sampling.temperature < GREEDY_BELOW,
        min_tokens=sampling.min_tokens,
        max_tokens=NO_LIMIT if sampling.max_tokens is None else sampling.max_tokens,
        stops=own if sampling.ignore_eos else own | frozenset(eos_ids),
        banned=own | frozenset(eos_ids),
    )


def pick(seed, banned: frozenset[int], vocab_size: int) -> int:
    """Return the first candidate that is not banned."""
    rank = 0
    while (token := int(candidate(seed, rank, vocab_size))) in banned:
        rank += 1
    return token
