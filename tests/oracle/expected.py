"""The truth: a request's tokens and log-probabilities, computed alone, without pages or batches."""

import dataclasses
from collections.abc import Sequence

from hash_model import (
    MASK,
    SPOTS,
    at_spot,
    join,
    logprob,
    pick,
    randomized,
    rules_of,
    seed_of,
    top_id,
)

from inferjax.config import ModelConfig
from inferjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One drawn token and what is reported with it."""

    token: int
    logprob: float
    sampled_logprob: float
    top: tuple[tuple[int, float], ...]
    chosen: tuple[float, ...]


class Decoder:
    """The hash model over one sequence: push a token, get its final hidden value."""

    def __init__(self, config: ModelConfig) -> None:
        self.windows = [spec.attention.window for spec in config.layers]
        self.keys: list[list[int]] = [[] for _ in self.windows]
        # Sums over the layer's keys at their positions, with a leading 0.
        self.sums = [[0] for _ in self.windows]
        self.history = 0
        self.length = 0

    def push(self, token: int) -> int:
        hidden, spot = join(token, self.length), SPOTS[self.length]
        for layer, window in enumerate(self.windows):
            key = join(hidden, layer)
            self.keys[layer].append(key)
            sums = self.sums[layer]
            sums.append((sums[-1] + at_spot(key, spot)) & MASK)
            first = max(0, self.length + 1 - window) if window else 0
            hidden = join(hidden, (sums[-1] - sums[first]) & MASK)
        self.history = (self.history + at_spot(token, spot)) & MASK
        self.length += 1
        return hidden


def expected(
    config: ModelConfig,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    key: int,
    sample_index: int = 0,
    limit: int,
    top: int = 0,
) -> list[Token]:
    """Return the drawn tokens, at most `limit`; `key` holds both words of the seed."""
    forced = sampling.forced_token_ids
    rules, decoder = rules_of(sampling, config.eos_ids), Decoder(config)
    limit = min(rules.max_tokens, limit)
    hidden = 0
    for token in prompt:
        hidden = decoder.push(token)
    drawn: list[Token] = []
    while len(drawn) < limit:
        seed = seed_of(hidden, decoder.history, len(prompt), rules.number)
        if not rules.greedy:
            seed = randomized(seed, key, sample_index, decoder.length)
        count = len(drawn)
        banned = rules.banned if count < rules.min_tokens else frozenset()
        token = forced[count] if count < len(forced) else pick(seed, banned, config.vocab_size)
        one = Token(
            token=token,
            logprob=logprob(hidden, token),
            sampled_logprob=0.0 if rules.greedy else logprob(seed, token),
            top=_top(config, hidden, top),
            chosen=tuple(logprob(hidden, wanted) for wanted in sampling.logprob_token_ids),
        )
        drawn.append(one)
        if token in rules.stops and len(drawn) > rules.min_tokens:
            break
        hidden = decoder.push(token)
    return drawn


def _top(config: ModelConfig, hidden: int, count: int) -> tuple[tuple[int, float], ...]:
    ids = [top_id(hidden, rank, config.vocab_size) for rank in range(count)]
    return tuple((token, logprob(hidden, token)) for token in ids)


def expected_scores(
    config: ModelConfig, tokens: Sequence[int], top: int = 0
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return log-probability and most likely tokens of every place but the first."""
    decoder = Decoder(config)
    hidden = [decoder.push(token) for token in tokens]
    pairs = zip(hidden, tokens[1:], strict=False)
    return [(logprob(h, token), _top(config, h, top)) for h, token in pairs]


def page_contents(
    config: ModelConfig, tokens: Sequence[int], page_size: int
) -> list[list[list[int]]]:
    """Return what the full pages of these tokens hold: [page][layer][offset]."""
    decoder = Decoder(config)
    for token in tokens:
        decoder.push(token)
    starts = range(0, len(tokens) - page_size + 1, page_size)
    return [[keys[s : s + page_size] for keys in decoder.keys] for s in starts]
