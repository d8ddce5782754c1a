import dataclasses

import pytest
from tiny_models import tiny_model
from tokenizer_vocabularies import byte_level_metadata

import inferjax as ij
from inferjax.bench import sinks
from inferjax.errors import InvalidInput
from inferjax.tokenizer import tokenizer_from_gguf

PLAN = sinks.Plan(context=32, sink_tokens=8, num_tokens=100)
EXEC = ij.Exec(page_size=8)


def reader():
    return dataclasses.replace(
        tiny_model("llama"), tokenizer=tokenizer_from_gguf(byte_level_metadata())
    )


def test_every_way_reads_the_same_tokens():
    result = sinks.measure(reader(), "All that is gold does not glitter. " * 9, PLAN, exec=EXEC)
    ways = result["ways"]
    assert list(ways) == list(sinks.TITLES)
    assert (result["num_tokens"], result["num_measured"], result["dropped_at_once"]) == (100, 68, 8)
    assert all(0 < row["nll"] < 20 for row in ways.values())
    assert len({row["nll"] for row in ways.values()}) == 4
    assert len(sinks.table(result).splitlines()) == 7


def test_streaming_equals_the_full_context_until_it_is_full():
    model, exec = reader(), EXEC
    tokens = model.tokenizer.encode("Not all those who wander are lost. " * 9)[:100]
    full = sinks._full(model, tokens, exec)
    streamed = sinks._streamed(model, tokens, 32, 8, exec)
    assert len(streamed) == len(full) == 99
    assert streamed[:31] == pytest.approx(full[:31], abs=1e-4)
    assert streamed[31:] != pytest.approx(full[31:], abs=1e-4)


def test_a_short_text_is_refused():
    with pytest.raises(InvalidInput, match="at least 64 tokens"):
        sinks.measure(reader(), "short", PLAN, exec=EXEC)
