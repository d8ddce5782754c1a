"""From what a user hands in to a checked request: ids, settings with nothing left open, samples."""

import dataclasses
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from inferjax.config import ModelConfig
from inferjax.engine.config import EngineConfig
from inferjax.engine.overflow import Middle
from inferjax.errors import InvalidInput, InvalidSampling, RequestTooLong
from inferjax.generation import banned_ids
from inferjax.runtime.arguments import host_integers
from inferjax.sampling import SamplingParams
from inferjax.sampling.widths import check_request
from inferjax.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked request.

    `sampling` has its `max_tokens` and no text among the banned words; `seed` is decided, so that
    it can be repeated. `number` counts the engine's requests.
    """

    request_id: str
    number: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    priority: int
    cache_salt: str
    submitted: float

    def key(self, num_dropped: int = 0) -> tuple[int, int]:
        """Return the words of the random key, at first those that `generate` makes of the seed.

        Positions come again after tokens were dropped, and their random numbers must not.
        """
        seed = _derived_seed(self.seed, num_dropped) if num_dropped else self.seed
        return seed >> 32, seed & 0xFFFFFFFF

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are wanted."""
        return self.sampling.prompt_logprobs is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What requests are checked against.

    `max_len` is the most tokens that a sequence can have, or with a `middle` have at a time.
    """

    model_config: ModelConfig
    tokenizer: Tokenizer | None
    config: EngineConfig
    max_len: int
    middle: Middle | None = None

    def prompt_ids(self, prompt: Any) -> tuple[int, ...]:
        """Return the ids of a text, of a list of ids, or of a list of chat messages.

        Raises: InvalidInput, ShapeError; TokenizerError, TemplateError from the tokenizer.
        """
        messages = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)
        if isinstance(prompt, str) or messages:
            if self.tokenizer is None:
                raise InvalidInput(
                    "the prompt is text, and the model has no tokenizer",
                    why="text cannot become tokens without a vocabulary",
                    fix="give token ids",
                )
            if isinstance(prompt, str):
                ids = tuple(self.tokenizer.encode(prompt))
            else:
                ids = tuple(self.tokenizer.apply_chat_template(list(prompt)))
        else:
            ids = self._flat(prompt)
        self._check_prompt(ids)
        return ids

    def _flat(self, prompt: Any) -> tuple[int, ...]:
        array = host_integers(prompt, "prompt")
        if array.ndim != 1:
            raise InvalidInput(
                f"the prompt has {array.ndim} axes",
                why="a request is one prompt",
                fix="submit every row of a batch on its own",
            )
        return tuple(array.tolist())

    def _check_prompt(self, ids: tuple[int, ...]) -> None:
        if not ids:
            raise InvalidInput(
                "empty prompt",
                why="there is nothing to predict from",
                fix="give at least one token, for example the BOS id",
            )
        size = self.model_config.vocab_size
        bad = next((i for i, token in enumerate(ids) if not 0 <= token < size), None)
        if bad is not None:
            raise InvalidInput(
                f"token id {ids[bad]} at position {bad}",
                why=f"the vocabulary has {size} ids",
                fix="encode the text with this model's tokenizer",
            )

    def sampling(self, sampling: Any, prompt_len: int) -> SamplingParams:
        """Return the request's settings with `max_tokens` decided and words as ids.

        Raises: InvalidSampling, RequestTooLong.
        """
        if not isinstance(sampling, SamplingParams):
            raise InvalidSampling(
                f"sampling is a {type(sampling).__name__}",
                why="it must be a SamplingParams",
                fix="SamplingParams.from_mapping builds one from a dict",
            )
        self._check_sizes(sampling)
        self._check_text(sampling)
        least = 0 if sampling.max_tokens is None else sampling.max_tokens
        least = max(least, sampling.min_tokens, len(sampling.forced_token_ids))
        if sampling.max_tokens is None:
            least = max(least, 1)
        excess = 0
        if self.middle is not None:
            excess = self.middle.excess(prompt_len, least)
        # Log-probabilities of a prompt need all of it.
        whole = self.middle is None or (excess and sampling.prompt_logprobs is not None)
        if whole and prompt_len + least > self.max_len:
            raise RequestTooLong(
                f"{prompt_len} prompt tokens and {least} to generate",
                why=f"a sequence may have {self.max_len} tokens in this engine",
                fix="shorten the prompt, or ask for fewer tokens",
                num_tokens=prompt_len + least,
                limit=self.max_len,
            )
        room = max(least, self.max_len - prompt_len + excess)
        banned = banned_ids(sampling.bad_words, self.tokenizer)
        resolved = dataclasses.replace(
            sampling,
            bad_words=(),
            bad_token_ids=(*sampling.bad_token_ids, *banned),
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
        )
        check_request(
            resolved,
            vocab_size=self.model_config.vocab_size,
            widths=self.config.widths,
        )
        return resolved

    def _check_sizes(self, sampling: SamplingParams) -> None:
        limits = {
            "n": (sampling.n, self.config.max_samples, "max_samples"),
            "logprobs": (sampling.logprobs or 0, self.config.max_logprobs, "max_logprobs"),
            "prompt_logprobs": (
                sampling.prompt_logprobs or 0,
                self.config.max_logprobs,
                "max_logprobs",
            ),
        }
        for name, (value, limit, setting) in limits.items():
            if value > limit:
                raise InvalidSampling(
                    f"{name}={value}",
                    why=f"this engine gives at most {limit}",
                    fix=f"ask for fewer, or start it with EngineConfig({setting}={value})",
                    field=name,
                    value=value,
                )

    def _check_text(self, sampling: SamplingParams) -> None:
        if self.tokenizer is not None:
            return
        if sampling.stop or sampling.bad_words or sampling.echo:
            raise InvalidSampling(
                "stop strings, bad words and echo are text",
                why="the model has no tokenizer",
                fix="use stop_token_ids and bad_token_ids",
            )


def decide_seed(sampling: SamplingParams, engine_seed: int | None, number: int) -> int:
    """Return the request's seed: its own, or one from the engine's and its number, or any."""
    if sampling.seed is not None:
        return sampling.seed
    if engine_seed is None:
        return secrets.randbits(63)
    return _derived_seed(engine_seed, number)


def _derived_seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def check_labels(priority: Any, cache_salt: Any, request_id: Any) -> None:
    """Refuse a priority, salt or id of another kind.

    Raises: InvalidInput.
    """
    whole = isinstance(priority, int) and not isinstance(priority, bool)
    if not whole or abs(priority) > 1 << 31:
        raise InvalidInput(
            f"priority={priority!r}", why="it is one integer, lower goes first", fix="give an int"
        )
    for name, value in (("cache_salt", cache_salt), ("request_id", request_id)):
        if value is not None and not isinstance(value, str):
            raise InvalidInput(f"{name}={value!r}", why="it is a name", fix="give a string")
