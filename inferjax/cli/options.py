"""Command-line flags made from a dataclass's fields, so that a flag and a field cannot differ."""

import argparse
import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

# What each field of SamplingParams does; one that is neither here nor in NOT_FLAGS fails a test.
SAMPLING_HELP = {
    "temperature": "0 takes the most likely token, higher is more varied",
    "top_k": "choose among the K most likely tokens; 0 is off",
    "top_p": "choose among the most likely tokens whose probabilities reach P; 1 is off",
    "min_p": "drop tokens less likely than P times the most likely one; 0 is off",
    "repetition_penalty": "divide the logits of tokens already in prompt or answer; 1 is off",
    "presence_penalty": "subtract once from the logits of tokens already in the answer",
    "frequency_penalty": "subtract for every time a token is already in the answer",
    "logit_bias": "add to the logit of a token; may be repeated",
    "allowed_token_ids": "allow only these tokens",
    "bad_token_ids": "never choose these tokens",
    "bad_words": "never write this text; may be repeated",
    "min_tokens": "do not stop before this many tokens",
    "max_tokens": "stop after this many tokens",
    "stop": "stop before this text; may be repeated",
    "stop_token_ids": "stop at these tokens, besides the model's own end",
    "ignore_eos": "go on after the model's end token",
    "seed": "random seed; the same seed gives the same answer",
    "logprobs": "report the log-probabilities of this many top tokens (with --json)",
    "logprob_token_ids": "report the log-probabilities of these tokens (with --json)",
    "forced_token_ids": "begin the answer with these tokens",
    "include_stop": "keep the stop string that ends the answer",
    "skip_special_tokens": "leave special tokens out of the text",
}

NOT_FLAGS = {
    "n": "the terminal shows one answer",
    "echo": "the prompt is in the terminal already",
    "prompt_logprobs": "the terminal shows the answer, not its prompt",
}

# What each field of EngineConfig does; one that is neither here nor in NOT_ENGINE_FLAGS fails a
# test.
ENGINE_HELP = {
    "max_running": "sequences that run at the same time",
    "max_waiting": "requests that may wait",
    "max_len": "tokens of a sequence, prompt included (default: the model's context)",
    "num_pages": "pages of the cache (default: what --cache-bytes buys)",
    "cache_bytes": "memory of the cache (default: what is needed, or what is there)",
    "token_budget": "tokens of one step: one per running sequence, the rest for prompts",
    "row_tokens": "tokens of a row of a prefill",
    "prefill_buckets": "numbers of rows that a prefill is compiled for",
    "decode_buckets": "numbers of sequences that a decode is compiled for",
    "decode_steps": "tokens that every sequence draws in one dispatch",
    "overflow": "refuse what outgrows --max-len, or drop older text: refuse or lossy_sinks",
    "sink_tokens": "first tokens that lossy_sinks never drops",
    "prefix_caching": "find prompts that start alike in the cache",
    "eviction": "which cached pages go first",
    "priority_window": "later requests that one level of priority is worth",
    "max_samples": "the most samples of one request",
    "max_logprobs": "the most top log-probabilities that a request may ask for",
    "overlap": "plan the next step while the device works",
}

NOT_ENGINE_FLAGS = {
    "widths": "a table of sizes; a program sets it",
    "seed": "--seed is the request's",
    "strict": "a command counts late compilations and goes on",
}


# What `load` takes as `quantize`; a test compares it with the schemes.
QUANTIZE = (
    "int4",
    "int4-g64",
    "int4-g128",
    "int8",
    "int8-g128",
    "int8-w8a8",
    "int4-w4a8",
    "bfloat16-w16a16",
    "fp8",
    "bfloat16",
    "float16",
    "float32",
    "native",
    "none",
)


def add_quantize_argument(parser: Any) -> None:
    """Add the flag that says how weights are packed."""
    parser.add_argument(
        "--quantize",
        metavar="SCHEME",
        help=f"pack the weights of products: {', '.join(QUANTIZE)} (default: native, what the "
        "checkpoint holds; none with --dtype)",
    )


def add_engine_fields(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `EngineConfig`."""
    from inferjax.engine.config import EngineConfig

    add_fields(parser, EngineConfig, title="engine", texts=ENGINE_HELP, defaults={})


def engine_config(args: argparse.Namespace, **defaults: object) -> Any:
    """Return the `EngineConfig` of the flags; `defaults` are the command's own.

    Raises: UnsupportedConfig.
    """
    from inferjax.engine.config import EngineConfig

    # A flag of another dataclass may have the same name.
    given: dict[str, Any] = dict(defaults)
    for name in ENGINE_HELP:
        if hasattr(args, name):
            given[name] = _frozen(getattr(args, name))
    return EngineConfig(**given)


def add_fields(
    parser: argparse.ArgumentParser,
    settings: type,
    *,
    title: str,
    texts: Mapping[str, str],
    defaults: Mapping[str, object],
) -> None:
    """Add a flag for every field that has a text; one that is not given leaves the field's default.

    `defaults` are this command's own, for fields where it differs from the dataclass.
    """
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(settings):
        if field.name not in texts:
            continue
        text, shown = texts[field.name], defaults.get(field.name, _default(field))
        if isinstance(shown, int | float) and not isinstance(shown, bool):
            text = f"{text} (default {shown})"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument(field.type),
        )


def from_fields[T](
    args: argparse.Namespace, settings: type[T], *, defaults: Mapping[str, object]
) -> T:
    """Build `settings` from the flags that were given; it validates their values itself."""
    given: dict[str, Any] = dict(defaults)
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]
        if hasattr(args, field.name):
            value = getattr(args, field.name)
            is_pairs = isinstance(value, list) and value and isinstance(value[0], tuple)
            given[field.name] = dict(value) if is_pairs else _frozen(value)
    return settings(**given)


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _default(field: dataclasses.Field) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _argument(hint: Any) -> dict[str, Any]:
    """Return how argparse reads a field of this type; a field that takes several values repeats."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    several = set().union(*map(_inner, options))
    if float in several:
        return {"action": "append", "type": _pair, "metavar": "ID=X"}
    if str in several:
        return {"action": "append", "type": str, "metavar": "TEXT"}
    if int in several:
        return {"action": "extend", "type": _ids, "metavar": "ID,ID"}
    if bool in options:
        return {"action": argparse.BooleanOptionalAction}
    kind = next(kind for kind in (float, int, str) if kind in options)
    return {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT"}[kind]}


def _inner(hint: Any) -> set[Any]:
    """Return the types inside a generic type, at any depth."""
    args = get_args(hint)
    return set(args).union(*map(_inner, args))


def _pair(text: str) -> tuple[int, float]:
    name, _, value = text.partition("=")
    return int(name), float(value)


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]
