"""Small engines over the tiny models, warmed up once per process and shared by the tests."""

import dataclasses
import functools
import gc

import jax
import numpy as np
from tiny_models import tiny_model
from tokenizer_vocabularies import byte_level_metadata

import inferjax as ij
from inferjax.sampling.widths import Widths
from inferjax.tokenizer import tokenizer_from_gguf

WIDTHS = Widths(stop_ids=4, bias=4, allowed=8, bad_words=4, bad_word_len=4, logprob_ids=4)
SMALL = ij.EngineConfig(
    max_running=4,
    max_len=96,
    num_pages=64,
    token_budget=32,
    row_tokens=8,
    decode_steps=8,
    prefill_buckets=(),
    decode_buckets=(),
    max_logprobs=3,
    widths=WIDTHS,
    strict=True,
)


def make_engine(
    family: str = "llama", *, exact: bool = False, warm: bool = False, **changes: object
) -> ij.Engine:
    """Return an engine of four slots and pages of eight tokens."""
    config = dataclasses.replace(SMALL, **changes)
    engine = ij.Engine(tiny_model(family), config, exec=ij.Exec(page_size=8, exact=exact))
    if warm:
        engine.warmup()
    return engine


@functools.cache
def shared_engine(family: str = "llama") -> ij.Engine:
    """Return a warm engine; tests leave nothing running in it."""
    return make_engine(family, warm=True)


def random_prompt(length: int, seed: int = 0, vocab: int = 250) -> list[int]:
    """Return random ids."""
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def drain(engine: ij.Engine) -> dict[str, ij.Completion]:
    """Run until nothing is left; return the completions."""
    found = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.completion is not None:
                found[delta.request_id] = delta.completion
    return found


@functools.cache
def text_engine() -> ij.Engine:
    """Return a warm engine over tiny llama with a byte-level vocabulary of 256 + 3 words."""
    model = tiny_model("llama")
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    model = dataclasses.replace(model, tokenizer=tokenizer)
    engine = ij.Engine(model, SMALL, exec=ij.Exec(page_size=8))
    engine.warmup()
    return engine


def drop_programs() -> None:
    """Drop all compiled programs, and the engines that were warmed up with them."""
    shared_engine.cache_clear()
    text_engine.cache_clear()
    jax.clear_caches()
    gc.collect()
