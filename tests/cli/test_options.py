import argparse
import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from inferjax.cli.options import (
    ENGINE_HELP,
    NOT_ENGINE_FLAGS,
    NOT_FLAGS,
    SAMPLING_HELP,
    add_engine_fields,
    add_fields,
    engine_config,
    from_fields,
)
from inferjax.engine import EngineConfig
from inferjax.errors import UnsupportedConfig
from inferjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of every kind that a setting can have."""

    warmth: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    ignore_eos: bool = False
    hidden: int = 1


def parse(*words: str, defaults: dict[str, object] | None = None) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    given = defaults or {}
    texts = {field.name: "" for field in dataclasses.fields(Settings) if field.name != "hidden"}
    add_fields(parser, Settings, title="sampling", texts=texts, defaults=given)
    return from_fields(parser.parse_args(words), Settings, defaults=given)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--warmth", "0.5"], "warmth", 0.5),
        (["--seed", "7"], "seed", 7),
        (["--max-tokens", "3"], "max_tokens", 3),
        (["--stop", "\n\n", "--stop", "END"], "stop", ("\n\n", "END")),
        (["--stop-token-ids", "1,2", "--stop-token-ids", "3"], "stop_token_ids", (1, 2, 3)),
        (["--allowed", "4"], "allowed", (4,)),
        (["--logit-bias", "5=-1.5", "--logit-bias", "6=2"], "logit_bias", {5: -1.5, 6: 2.0}),
        (["--ignore-eos"], "ignore_eos", True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_option_sets_its_field_and_no_other(words, field, value):
    assert parse(*words) == dataclasses.replace(Settings(), **{field: value})


def test_option_not_given_leaves_the_default():
    assert parse() == Settings()


def test_option_default_of_the_command_yields_to_the_flag():
    defaults: dict[str, object] = {"warmth": 0.0, "max_tokens": 99}
    assert parse(defaults=defaults) == Settings(warmth=0.0, max_tokens=99)
    assert parse("--warmth", "2", defaults=defaults) == Settings(warmth=2.0, max_tokens=99)


@pytest.mark.parametrize("words", [["--logit-bias", "a=b"], ["--seed", "x"], ["--hidden", "1"]])
def test_option_that_cannot_be_read_is_refused(words):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parse(*words)


def test_help_shows_defaults_and_escapes_percent_signs():
    parser = argparse.ArgumentParser()
    add_fields(parser, Settings, title="t", texts={"warmth": "90 % more"}, defaults={"warmth": 0.3})
    assert "90 % more (default 0.3)" in parser.format_help()


def test_every_sampling_field_has_a_flag_or_a_reason_not_to():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(SAMPLING_HELP) | set(NOT_FLAGS) == fields
    assert not set(SAMPLING_HELP) & set(NOT_FLAGS)


def test_sampling_flags_build_the_params_they_name():
    parser = argparse.ArgumentParser()
    add_fields(parser, SamplingParams, title="t", texts=SAMPLING_HELP, defaults={})
    words = "--temperature 0.5 --top-k 4 --stop a --stop b --logit-bias 3=1 --bad-token-ids 1,2"
    got = from_fields(parser.parse_args(words.split()), SamplingParams, defaults={"seed": 3})
    assert got == SamplingParams(
        temperature=0.5, top_k=4, stop=["a", "b"], logit_bias={3: 1.0}, bad_token_ids=[1, 2], seed=3
    )


def test_every_engine_field_has_a_flag_or_a_reason_not_to():
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(ENGINE_HELP) | set(NOT_ENGINE_FLAGS) == fields
    assert not set(ENGINE_HELP) & set(NOT_ENGINE_FLAGS)


def engine_flags(*words: str, **defaults: object) -> EngineConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    add_engine_fields(parser)
    return engine_config(parser.parse_args(words), **defaults)


def test_engine_flags_build_the_config_they_name():
    words = "--max-running 3 --decode-buckets 1,2 --no-prefix-caching --max-len 9 --seed 5"
    expected = EngineConfig(max_running=3, decode_buckets=(1, 2), prefix_caching=False, max_len=9)
    assert engine_flags(*words.split()) == expected


def test_engine_flags_come_before_the_defaults_of_the_command():
    assert engine_flags(max_running=3).max_running == 3
    assert engine_flags("--max-running", "2", max_running=3).max_running == 2
    assert engine_flags() == EngineConfig()


def test_engine_flags_with_impossible_values_are_explained():
    with pytest.raises(UnsupportedConfig, match="eviction"):
        engine_flags("--eviction", "random")
