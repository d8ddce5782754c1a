"""One line of a batch: what it asks for, and what is written about it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from inferjax.engine import Completion, Engine, Sample
from inferjax.errors import InferjaxError, InvalidInput
from inferjax.sampling import SamplingParams

LABELS = ("prompt", "messages", "id", "priority", "cache_salt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a line asks for; `prompt` is for the engine to check."""

    prompt: Any
    sampling: SamplingParams
    priority: Any = 0
    cache_salt: Any = None

    def submit(self, engine: Engine) -> str:
        """Queue the request and return its id.

        Raises: as `Engine.submit`.
        """
        return engine.submit(
            self.prompt, self.sampling, priority=self.priority, cache_salt=self.cache_salt
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads lines: `sampling` holds for fields that a line leaves out; `chat` wraps plain text."""

    sampling: SamplingParams
    chat: bool

    def ask(self, fields: Mapping[str, Any]) -> Ask:
        """Return what a line's object asks for.

        Raises: InvalidInput, InvalidSampling.
        """
        own = {name: value for name, value in fields.items() if name not in LABELS}
        defaults = {name: getattr(self.sampling, name) for name in _sampling_fields()}
        return Ask(
            prompt=self._prompt(fields),
            sampling=SamplingParams.from_mapping({**defaults, **own}),
            priority=fields.get("priority", 0),
            cache_salt=fields.get("cache_salt"),
        )

    def _prompt(self, fields: Mapping[str, Any]) -> Any:
        if ("prompt" in fields) == ("messages" in fields):
            raise InvalidInput(
                f"a line with {'both' if 'prompt' in fields else 'none'} of prompt and messages",
                why="one of them is what the model answers",
                fix='write {"prompt": text or token ids} or {"messages": [...]}',
            )
        if "messages" in fields:
            messages = fields["messages"]
            if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
                raise InvalidInput(
                    "messages are no list of objects",
                    why="a conversation is a list of messages",
                    fix='write [{"role": "user", "content": "..."}]',
                )
            return messages
        prompt = fields["prompt"]
        if isinstance(prompt, str) and self.chat:
            return [{"role": "user", "content": prompt}]
        return prompt


def parse(content: bytes) -> dict[str, Any]:
    """Return the object on a line.

    Raises: InvalidInput.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            "the line is no JSON", why=str(error), fix="write one JSON object a line"
        ) from error
    if not isinstance(fields, dict):
        raise InvalidInput(
            f"the line is a {type(fields).__name__}",
            why="a request has named fields",
            fix='write an object such as {"prompt": "..."}',
        )
    return fields


def result_of(completion: Completion, sampling: SamplingParams) -> dict[str, Any]:
    """Return what is written about a request that has ended."""
    if completion.error is not None:
        return failure(completion.error)
    result = {
        "samples": [_sample(sample, sampling) for sample in completion.samples],
        "usage": dataclasses.asdict(completion.usage),
        "timings": dataclasses.asdict(completion.timings),
    }
    if sampling.prompt_logprobs is not None:
        result["prompt_logprobs"] = completion.prompt_logprobs
    if sampling.prompt_logprobs:
        result["prompt_top_logprobs"] = completion.prompt_top_logprobs
    return result


def failure(error: InferjaxError) -> dict[str, Any]:
    """Return what is written about a request that was refused, or failed."""
    return {"error": {"type": type(error).__name__, "message": str(error)}}


def _sample(sample: Sample, sampling: SamplingParams) -> dict[str, Any]:
    """Return a sample; log-probabilities only as far as they were asked for."""
    found: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sampling.logprobs is not None:
        found["logprobs"] = sample.tokens.logprobs
        # A forced token that could not have been drawn has -inf, for which JSON has no number.
        found["sampled_logprobs"] = [
            value if math.isfinite(value) else None for value in sample.tokens.sampled_logprobs
        ]
    if sampling.logprobs:
        found["top_logprobs"] = sample.tokens.top_logprobs
    if sampling.logprob_token_ids:
        found["chosen_logprobs"] = sample.tokens.chosen_logprobs
    return found


def _sampling_fields() -> list[str]:
    return [field.name for field in dataclasses.fields(SamplingParams)]
