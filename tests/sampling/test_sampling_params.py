"""`SamplingParams`: what it accepts, what it refuses and how, and the arrays it becomes."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from inferjax.errors import InvalidSampling
from inferjax.sampling import NO_LIMIT, SamplingParams, sampling_arrays, seed_keys

REFUSED = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "finite"),
    ("temperature", math.inf, "finite"),
    ("temperature", True, "finite number"),
    ("temperature", "1", "finite number"),
    ("temperature", None, "finite number"),
    ("temperature", 10**400, "finite number"),
    ("top_k", -2, "integer from -1"),
    ("top_k", 1.5, "integer"),
    ("top_k", True, "integer"),
    ("top_k", 2**31, "2147483647"),
    ("top_p", 0.0, "above 0"),
    ("top_p", 1.1, "at most 1"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", math.nan, "from 0 to 1"),
    ("repetition_penalty", 0, "above 0"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("logit_bias", {1: math.inf}, "finite"),
    ("logit_bias", {-1: 1.0}, "integer from 0"),
    ("logit_bias", {"1": 1.0}, "integer"),
    ("logit_bias", [(1, 2.0), (1, 3.0)], "once"),
    ("logit_bias", [1], "mapping"),
    ("logit_bias", 3, "mapping"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", [-1], "integer from 0"),
    ("allowed_token_ids", "12", "list of token ids"),
    ("bad_token_ids", [[]], "none of them empty"),
    ("bad_token_ids", [[1, -2]], "integer from 0"),
    ("bad_token_ids", [True], "list of token ids"),
    ("bad_words", [""], "none of them empty"),
    ("bad_words", [3], "strings"),
    ("min_tokens", -1, "integer from 0"),
    ("max_tokens", -1, "or None"),
    ("stop", "", "none of them empty"),
    ("stop", ["a", ""], "none of them empty"),
    ("stop", [b"a"], "strings"),
    ("stop_token_ids", [1.0], "integer"),
    ("ignore_eos", 1, "True or False"),
    ("seed", -1, "integer from 0"),
    ("seed", 2**64, "integer from 0"),
    ("n", 0, "integer from 1"),
    ("logprobs", -1, "or None"),
    ("logprob_token_ids", [-1], "integer from 0"),
    ("prompt_logprobs", -1, "or None"),
    ("forced_token_ids", "12", "list of token ids"),
    ("echo", 1, "True or False"),
    ("include_stop", None, "True or False"),
    ("skip_special_tokens", "no", "True or False"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED, ids=lambda case: str(case)[:20])
def test_bad_value_is_refused_with_field_value_and_range(field, value, allowed):
    with pytest.raises(InvalidSampling) as caught:
        SamplingParams(**{field: value})
    text = str(caught.value)
    assert text.startswith(field)
    assert allowed in text
    assert caught.value.field == field


def test_every_field_has_a_refused_value():
    assert {field for field, _, _ in REFUSED} == {
        field.name for field in dataclasses.fields(SamplingParams)
    }


def test_combinations_are_checked():
    with pytest.raises(InvalidSampling, match="min_tokens is 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidSampling, match="n is 2"):
        SamplingParams(n=2, temperature=0)


def test_values_are_stored_plain_and_hashable():
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        logit_bias={7: 1, 2: -3},
        bad_token_ids=[4, [5, 6]],
        stop="END",
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[9],
    )
    assert (params.temperature, type(params.temperature), type(params.top_k)) == (0.5, float, int)
    assert params.logit_bias == ((2, -3.0), (7, 1.0))
    assert params.bad_token_ids == ((4,), (5, 6))
    assert (params.stop, params.stop_token_ids) == (("END",), (1, 2))
    assert hash(params) == hash(params)
    assert SamplingParams(logit_bias=params.logit_bias).logit_bias == params.logit_bias


def test_mapping_is_read_from_json():
    fields = json.loads('{"temperature": 0, "logit_bias": {"12": -1.5}, "stop": ["a", "b"]}')
    params = SamplingParams.from_mapping(fields)
    assert params == SamplingParams(temperature=0.0, logit_bias={12: -1.5}, stop=("a", "b"))
    with pytest.raises(InvalidSampling, match="temperature is nan"):
        SamplingParams.from_mapping(json.loads('{"temperature": NaN}'))
    for fields in ("null", "[1]", '"greedy"', '{"logit_bias": {"%s": 1}}' % ("9" * 5000)):
        with pytest.raises(InvalidSampling, match=r"sampling is|logit_bias is"):
            SamplingParams.from_mapping(json.loads(fields))


def test_unknown_fields_are_named_with_the_nearest_known_one():
    with pytest.raises(InvalidSampling, match=r"temprature.*\n.*\n.*did you mean temperature"):
        SamplingParams.from_mapping({"temprature": 1.0})
    with pytest.raises(InvalidSampling, match=r"aaa, zzz(.|\n)*use one of: temperature, top_k"):
        SamplingParams.from_mapping({"zzz": 1, "aaa": 2})


def test_arrays_have_one_row_per_request_and_fixed_dtypes():
    rows = [
        SamplingParams(),
        SamplingParams(
            top_k=4,
            max_tokens=9,
            ignore_eos=True,
            stop_token_ids=[1, 2, 3],
            logit_bias={5: 2.0},
            bad_token_ids=[7, [8, 9, 6]],
            allowed_token_ids=[3],
            logprobs=2,
            logprob_token_ids=[6, 5, 6],
        ),
    ]
    arrays = sampling_arrays(rows, vocab_size=10, eos_ids=(0, 4))
    assert arrays.top_k.tolist() == [0, 4]
    assert arrays.max_tokens.tolist() == [NO_LIMIT, 9]
    assert arrays.ignore_eos.tolist() == [False, True]
    assert arrays.eos_ids.tolist() == [[0, 4], [0, 4]]
    assert arrays.stop_ids.tolist() == [[-1] * 4, [1, 2, 3, -1]]
    assert (arrays.bias_ids.tolist(), arrays.bias.tolist()) == ([[-1], [5]], [[0.0], [2.0]])
    assert arrays.allowed_ids.tolist() == [[-1], [3]]
    assert arrays.num_top.tolist() == [0, 2]
    assert arrays.logprob_ids.tolist() == [[-1] * 4, [6, 5, 6, -1]]
    assert arrays.bad_words[1].tolist() == [[-1, -1, -1, 7], [-1, 8, 9, 6]]
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(arrays)}
    assert dtypes == {"float32", "int32", "bool"}
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(arrays))


def test_arrays_of_plain_requests_have_no_id_axes():
    arrays = sampling_arrays([SamplingParams()] * 3, vocab_size=10)
    assert arrays.allowed_ids.shape == arrays.stop_ids.shape == arrays.eos_ids.shape == (3, 0)
    assert arrays.bad_words.shape == (3, 0, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {10: 1.0}},
        {"allowed_token_ids": [10]},
        {"stop_token_ids": [10]},
        {"bad_token_ids": [[1, 10]]},
        {"logprob_token_ids": [10]},
        {"forced_token_ids": [3, 10]},
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_refused(fields):
    (name,) = fields
    with pytest.raises(InvalidSampling, match=rf"{name} contains token id 10(.|\n)*0 to 9"):
        sampling_arrays([SamplingParams(**fields)], vocab_size=10)


def test_bad_eos_ids_and_untokenized_bad_words_are_refused():
    with pytest.raises(InvalidSampling, match="eos_ids contains token id 99"):
        sampling_arrays([SamplingParams()], vocab_size=10, eos_ids=[99])
    with pytest.raises(InvalidSampling, match="still text"):
        sampling_arrays([SamplingParams(bad_words=["no"])], vocab_size=10)


def test_seed_keys_keep_all_bits_and_equal_jax_keys_below_32():
    keys = jax.random.key_data(seed_keys([5, 2**40 + 5, 2**64 - 1]))
    assert keys[0].tolist() == jax.random.key_data(jax.random.key(5)).tolist()
    assert len({tuple(key) for key in keys.tolist()}) == 3
