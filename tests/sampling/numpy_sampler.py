"""The whole sampling chain, naively, one row at a time in float64: the tests' truth."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Row:
    """One row's logits and settings, in plain Python."""

    logits: np.ndarray
    history: list = dataclasses.field(default_factory=list)
    prompt_len: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    eos_ids: tuple = ()
    stop_ids: tuple = ()
    bias: dict = dataclasses.field(default_factory=dict)
    allowed: tuple = ()
    bad_words: tuple = ()
    token_mask: set | None = None
    num_top: int = 1 << 30
    logprob_ids: tuple = ()
    forced: tuple = ()
    vocab_size: int | None = None


def raw_logprobs(row):
    logits = _real(row)
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())


def processed(row):
    logits = _real(row)
    output = row.history[row.prompt_len :]
    banned = set()
    if row.token_mask is not None:
        banned |= set(range(logits.size)) - row.token_mask
    if row.allowed:
        banned |= set(range(logits.size)) - set(row.allowed)
    for word in row.bad_words:
        head = list(word[:-1])
        if row.history[len(row.history) - len(head) :] == head:
            banned.add(word[-1])
    if len(output) < row.min_tokens:
        banned |= set(row.eos_ids) | set(row.stop_ids)
    logits[sorted(banned)] = -np.inf
    for token, value in row.bias.items():
        logits[token] += value
    for token in set(row.history):
        value = logits[token]
        penalty = row.repetition_penalty
        logits[token] = value / penalty if value > 0 else value * penalty
    for token in set(output):
        logits[token] -= row.frequency_penalty * output.count(token) + row.presence_penalty
    return logits


def distribution(row):
    """Return ids in drawing order and their probabilities."""
    logits = processed(row)
    ids = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    if row.temperature < 1e-5:
        return np.array(ids[:1]), np.array([1.0])
    weights = np.exp((logits - logits.max()) / row.temperature)
    filtered = 0 < row.top_k < logits.size or row.top_p < 1 or row.min_p > 0
    if not filtered:
        return np.arange(logits.size), weights / weights.sum()
    ids = [token for token in ids if weights[token] >= row.min_p]
    ids = ids[: row.top_k] if row.top_k > 0 else ids
    mass = weights[ids].sum()
    kept, total = [], 0.0
    for token in ids:
        if row.top_p < 1 and total >= row.top_p * mass:
            break
        kept.append(token)
        total += weights[token]
    return np.array(kept), weights[kept] / weights[kept].sum()


def draw(row, uniform):
    """Return the token at `uniform` of the running probability, and how near a boundary it was."""
    ids, probabilities = distribution(row)
    running = np.cumsum(probabilities)
    index = np.searchsorted(running, uniform * running[-1], side="right")
    margin = np.abs(running - uniform * running[-1]).min()
    return int(ids[min(index, ids.size - 1)]), margin


def _real(row):
    return np.asarray(row.logits, np.float64)[: row.vocab_size].copy()
