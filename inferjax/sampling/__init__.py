"""From logits to a token: penalties, masks, filters and the draw, as pure functions of arrays."""

from inferjax.sampling.arrays import (
    GREEDY_BELOW,
    NO_LIMIT,
    Sampled,
    SampleState,
    Sampling,
    greedy_rows,
    make_sampling,
    make_state,
    stopped,
)
from inferjax.sampling.chain import processed_logits, sample
from inferjax.sampling.logprobs import token_logprobs
from inferjax.sampling.params import SamplingParams
from inferjax.sampling.rows import sampling_arrays, sampling_rows, seed_keys
from inferjax.sampling.status import Status
from inferjax.sampling.widths import Widths, check_request, check_widths

__all__ = [
    "GREEDY_BELOW",
    "NO_LIMIT",
    "SampleState",
    "Sampled",
    "Sampling",
    "SamplingParams",
    "Status",
    "Widths",
    "check_request",
    "check_widths",
    "greedy_rows",
    "make_sampling",
    "make_state",
    "processed_logits",
    "sample",
    "sampling_arrays",
    "sampling_rows",
    "seed_keys",
    "stopped",
    "token_logprobs",
]
