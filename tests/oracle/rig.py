"""An engine over the oracle, and what its requests must return."""

import dataclasses
from pathlib import Path
from typing import Any, cast

from expected import Token, expected, expected_scores
from hash_model import config_of, rules_of
from oracle import Oracle

from inferjax.checkpoint.load import Model
from inferjax.config import Exec, ModelConfig
from inferjax.engine import Completion, Engine, EngineConfig, Tokens
from inferjax.engine.sizes import make_sizes
from inferjax.sampling import SamplingParams
from inferjax.tokenizer import Tokenizer

PAGE_SIZE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Rig:
    """An engine, its device, and the model that both run."""

    engine: Engine
    oracle: Oracle
    config: ModelConfig


def make_rig(
    windows: tuple[int | None, ...] = (None, None),
    *,
    page_size: int = PAGE_SIZE,
    depth: int = 2,
    seed: int = 0,
    max_context: int = 128,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> Rig:
    """Return an engine with EngineConfig(**settings) over an oracle with the same sizes."""
    model_config = config_of(windows, max_context=max_context)
    model = _model(model_config, tokenizer)
    settings = {"max_running": 4, "row_tokens": 8, "token_budget": 32, **settings}
    config, exec = EngineConfig(**settings), Exec(page_size=page_size)
    sizes = make_sizes(model, config, exec)
    oracle = Oracle(
        model_config,
        num_pages=sizes.num_pages,
        page_size=page_size,
        num_slots=config.max_running,
        max_rows=sizes.buckets.prefill_rows[-1],
        capacity=sizes.max_len,
        top=config.max_logprobs,
        row_sizes=sizes.buckets.prefill_rows,
        slot_sizes=sizes.buckets.decode_slots,
        depth=depth,
        seed=seed,
    )
    engine = Engine(model, config, exec=exec, programs=cast(Any, oracle), clock=Clock())
    return Rig(engine, oracle, model_config)


def _model(config: ModelConfig, tokenizer: Tokenizer | None) -> Model:
    # The dataclass would have its parameters checked; hashes have none.
    model = object.__new__(Model)
    fields = {"config": config, "params": None, "tokenizer": tokenizer}
    for name, value in {**fields, "family": "oracle", "path": Path("oracle")}.items():
        object.__setattr__(model, name, value)
    return model


class Clock:
    """A clock that ticks when it is looked at, and interrupts who looks at `alarm`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.alarm = -1.0

    def __call__(self) -> float:
        self.now += 1.0
        if self.now == self.alarm:
            raise KeyboardInterrupt
        return self.now


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A request with a seed, as handed to `submit`."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    salt: str | None = None

    def submit(self, rig: Rig, request_id: str | None = None) -> str:
        return rig.engine.submit(
            self.prompt,
            self.sampling,
            priority=self.priority,
            cache_salt=self.salt,
            request_id=request_id,
        )


def truth(rig: Rig, wish: Wish, sample_index: int, limit: int | None = None) -> list[Token]:
    """Return what a sample of a request draws, at most `limit` tokens."""
    sampling, room = wish.sampling, rig.engine.max_len - len(wish.prompt)
    assert sampling.seed is not None
    return expected(
        rig.config,
        wish.prompt,
        sampling,
        key=sampling.seed,
        sample_index=sample_index,
        limit=room if limit is None else limit,
        top=sampling.logprobs or 0,
    )


def check_completion(rig: Rig, wish: Wish, completion: Completion) -> None:
    """Compare a finished request with the truth."""
    assert completion.error is None, completion.error
    right = [truth(rig, wish, index) for index in range(wish.sampling.n)]
    assert [sample.index for sample in completion.samples] == list(range(wish.sampling.n))
    for sample, drawn in zip(completion.samples, right, strict=True):
        assert sample.tokens == tokens_of(drawn, wish.sampling), (wish, sample.index)
        end = _end_of(rig, wish, drawn)
        assert (sample.finish_reason, sample.stop_reason) == end, (wish, sample.index)
    usage = completion.usage
    assert usage.prompt_tokens == len(wish.prompt)
    assert usage.completion_tokens == sum(map(len, right))
    assert 0 <= usage.cached_tokens < len(wish.prompt)
    _check_scores(rig, wish, completion)


def tokens_of(drawn: list[Token], sampling: SamplingParams) -> Tokens:
    """Return tokens as a completion reports them."""
    return Tokens(
        ids=tuple(t.token for t in drawn),
        logprobs=tuple(t.logprob for t in drawn),
        sampled_logprobs=tuple(t.sampled_logprob for t in drawn),
        top_logprobs=tuple(t.top for t in drawn) if sampling.logprobs else (),
        chosen_logprobs=tuple(t.chosen for t in drawn) if sampling.logprob_token_ids else (),
    )


def _end_of(rig: Rig, wish: Wish, drawn: list[Token]) -> tuple[str, int | None]:
    rules = rules_of(wish.sampling, rig.config.eos_ids)
    last = drawn[-1].token if len(drawn) > rules.min_tokens else None
    if last not in rules.stops:
        return "length", None
    return "stop", last if last in wish.sampling.stop_token_ids else None


def _check_scores(rig: Rig, wish: Wish, completion: Completion) -> None:
    wanted = wish.sampling.prompt_logprobs
    if wanted is None:
        assert completion.prompt_logprobs is None
        return
    scores = expected_scores(rig.config, wish.prompt, wanted)
    assert completion.prompt_logprobs == (None, *(score for score, _ in scores))
    assert completion.prompt_top_logprobs == (None, *(top for _, top in scores))
