"""How long the lists of ids in a request may be, and whether a request can become a row."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, cast

from inferjax.config import check_setting
from inferjax.errors import InvalidSampling
from inferjax.sampling.params import SamplingParams

LARGEST_WIDTH = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """The longest lists of ids that a row has place for.

    With fixed widths no request changes a shape, so none compiles anything. bad_words counts
    sequences, bad_word_len the ids of one.

    Raises: UnsupportedConfig.
    """

    # The checks below give typed errors; a type checker at run time would come before them.
    __no_type_check__: ClassVar[bool] = True

    stop_ids: int = 16
    bias: int = 320
    allowed: int = 256
    bad_words: int = 64
    bad_word_len: int = 8
    logprob_ids: int = 16

    def __post_init__(self) -> None:
        """Refuse what is no width."""
        for field in dataclasses.fields(self):
            check_setting(self, field.name, int(field.name == "bad_word_len"), LARGEST_WIDTH)


def check_request(params: SamplingParams, *, vocab_size: int, widths: Widths | None = None) -> None:
    """Refuse a request that can become no row: text, ids outside the vocabulary, long lists.

    Raises: InvalidSampling.
    """
    if params.bad_words:
        raise InvalidSampling(
            f"bad_words {params.bad_words!r} are still text",
            why="arrays hold token ids",
            fix="encode them into bad_token_ids first",
            field="bad_words",
        )
    for name, ids in _named_ids(params).items():
        check_ids(name, ids, vocab_size)
    if widths is not None:
        check_widths(params, widths)


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Raises: InvalidSampling.
    """
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    token = next(token for token in ids if not 0 <= token < vocab_size)
    raise InvalidSampling(
        f"{name} contains token id {token}",
        why=f"the vocabulary has {vocab_size} ids, 0 to {vocab_size - 1}",
        fix="use ids of this model's tokenizer",
        field=name,
        token=token,
        vocab_size=vocab_size,
    )


def check_widths(params: SamplingParams, widths: Widths) -> None:
    """Refuse a request with a longer list than rows have place for.

    Raises: InvalidSampling.
    """
    words = bad_sequences(params)
    lengths = {
        "stop_ids": ("stop_token_ids", len(params.stop_token_ids)),
        "bias": ("logit_bias", len(params.logit_bias)),
        "allowed": ("allowed_token_ids", len(params.allowed_token_ids or ())),
        "bad_words": ("bad_token_ids", len(words)),
        "bad_word_len": ("a sequence in bad_token_ids", max(map(len, words), default=0)),
        "logprob_ids": ("logprob_token_ids", len(params.logprob_token_ids)),
    }
    for width, (name, length) in lengths.items():
        limit = getattr(widths, width)
        if length > limit:
            raise InvalidSampling(
                f"{name} has length {length}",
                why=f"the limit is {limit}, so that no request compiles a program of its own",
                fix=f"shorten it, or raise the limit with Widths({width}={length})",
                field=name,
                length=length,
                limit=limit,
            )


def bias_pairs(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    """Return the logit bias in the form in which it is stored."""
    return cast(tuple[tuple[int, float], ...], params.logit_bias)


def bad_sequences(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Return the banned sequences in the form in which they are stored."""
    return cast(tuple[tuple[int, ...], ...], params.bad_token_ids)


def _named_ids(params: SamplingParams) -> dict[str, Sequence[int]]:
    return {
        "logit_bias": [token for token, _ in bias_pairs(params)],
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_token_ids": [token for word in bad_sequences(params) for token in word],
        "logprob_token_ids": params.logprob_token_ids,
        "forced_token_ids": params.forced_token_ids,
    }
