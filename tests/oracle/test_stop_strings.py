"""Stop strings end an output between two tokens, though the device has drawn more of them."""

import dataclasses

import pytest
from rig import make_rig, truth
from test_scenarios import wish
from tokenizer_vocabularies import byte_level_metadata

from inferjax.tokenizer import tokenizer_from_gguf

TOKENIZER = tokenizer_from_gguf(byte_level_metadata())


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("decode_steps", [1, 8])
def test_stop_string_ends_the_tokens_where_it_ends_the_text(decode_steps, overlap):
    rig = make_rig(tokenizer=TOKENIZER, decode_steps=decode_steps, overlap=overlap)
    free = wish(9, 30, n=2)
    outputs = [[token.token for token in truth(rig, free, index)] for index in range(2)]
    stop = TOKENIZER.decode(outputs[0][10:12])
    sampling = dataclasses.replace(free.sampling, stop=(stop,))
    dataclasses.replace(free, sampling=sampling).submit(rig)
    deltas = []
    while rig.engine.has_work:
        deltas += rig.engine.step()
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1]
    completion = deltas[-1].completion
    assert completion is not None
    for sample, tokens in zip(completion.samples, outputs, strict=True):
        text = TOKENIZER.decode(tokens)
        ends = [n for n in range(30) if stop in TOKENIZER.decode(tokens[:n])]
        count = ends[0] if ends else 30
        assert sample.token_ids == tuple(tokens[:count])
        assert sample.text == text.partition(stop)[0]
        assert sample.finish_reason == ("stop" if ends else "length")
        assert sample.stop_reason == (stop if ends else None)
    assert len(completion.samples[0].token_ids) == 12
    assert completion.usage.completion_tokens < 60
