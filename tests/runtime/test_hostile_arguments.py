"""Arguments of the wrong kind, shape or range get a typed error that names them, never a cast."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import inferjax as ij
from inferjax.errors import (
    InferjaxError,
    InvalidInput,
    InvalidSampling,
    OutOfPages,
    ShapeError,
    UnsupportedConfig,
)
from inferjax.runtime.arguments import check_count
from inferjax.sampling import make_state
from inferjax.sampling.validity import check_shapes
from tests.tiny_models import tiny_model

GOOD = [[3, 4, 5]]

BAD_TOKENS = {
    "float": [[1.0, 2.0]],
    "bool": [[True, False]],
    "text": [["a", "b"]],
    "ragged": [[1, 2], [3]],
    "none": None,
    "flat": [1, 2],
    "empty": [[]],
    "no rows": [],
    "wraps to 1": [[2**32 + 1, 2]],
    "uint64": np.array([[2**63]], np.uint64),
    "durations": np.array([[1, 2]], "timedelta64[s]"),
    "keys": jax.random.split(jax.random.key(0), 2)[None],
}

BAD_LENGTHS = [0, 4, -1, 1.5, float("nan"), "a", [True], 2**40, [None], {}, [1, 2], [[1]]]


def model():
    return tiny_model("llama")


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
def test_tokens_that_are_not_a_batch_of_ids_are_refused(tokens):
    params, config = model().params, model().config
    tables = [jnp.ones((1, 1), jnp.int32)]
    for call in (
        lambda: ij.forward(params, config, tokens),
        lambda: ij.score(params, config, tokens),
        lambda: ij.generate(params, config, tokens, max_new_tokens=1),
        lambda: ij.make_inputs(tokens, block_tables=tables),
    ):
        with pytest.raises((ShapeError, InvalidInput), match="tokens"):
            call()


@pytest.mark.parametrize("lengths", BAD_LENGTHS, ids=repr)
def test_lengths_that_are_not_row_lengths_are_refused(lengths):
    with pytest.raises((ShapeError, InvalidInput), match="lengths"):
        ij.forward(model().params, model().config, GOOD, lengths)


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", None, True, float("nan")], ids=repr)
def test_sizes_must_be_positive_integers(value):
    with pytest.raises(InvalidInput, match="steps="):
        check_count("steps", value, 1)


@pytest.mark.parametrize("num_pages", [1, 0, -3, 2**31, [4, 4]], ids=repr)
def test_cache_refuses_impossible_page_counts(num_pages):
    with pytest.raises(OutOfPages, match="num_pages"):
        ij.init_cache(model().config, num_pages=num_pages)


def test_cache_too_large_for_memory_names_its_size():
    with pytest.raises(OutOfPages, match="GB"):
        ij.init_cache(model().config, num_pages=2**31 - 1)


@pytest.mark.parametrize("dtype", ["uint8", "foo", "float64"])
def test_cache_refuses_other_dtypes(dtype):
    with pytest.raises(UnsupportedConfig, match=dtype):
        ij.init_cache(model().config, num_pages=4, dtype=dtype)


@pytest.mark.parametrize("family", ["gpt2", "llama3_rope", "deepseek_v3"])
def test_params_of_another_model_are_refused_by_weight(family):
    with pytest.raises(ShapeError, match=r"params\."):
        ij.forward(tiny_model(family).params, model().config, GOOD)


def test_cache_and_tables_of_another_model_are_refused():
    params, config = model().params, model().config
    table = jnp.ones((1, 1), jnp.int32)
    inputs = ij.make_inputs(GOOD, block_tables=[table])
    cache = ij.init_cache(config, num_pages=4)
    whole = jax.tree.map(lambda x: x.astype(jnp.int32), cache)
    other = ij.init_cache(tiny_model("gemma3_text").config, num_pages=4)
    for wrong in (other, whole):
        with pytest.raises((ShapeError, TypeError), match=r"pools|groups|int32"):
            ij.extend(params, config, wrong, inputs)
    for tables in (
        [],
        [table, table],
        [jnp.ones((2, 1), jnp.int32)],
        [jnp.ones((1, 0), jnp.int32)],
    ):
        with pytest.raises(ShapeError, match="block tables"):
            ij.extend(params, config, cache, ij.make_inputs(GOOD, block_tables=tables))


def test_adapters_are_refused_until_they_exist():
    config = model().config
    inputs = ij.make_inputs(GOOD, block_tables=[jnp.ones((1, 1), jnp.int32)])
    inputs = dataclasses.replace(inputs, adapter=jnp.zeros(1, jnp.int32))
    with pytest.raises(InvalidInput, match="adapter"):
        ij.extend(model().params, config, ij.init_cache(config, num_pages=4), inputs)


@pytest.mark.parametrize("key", [0, "a", np.zeros(3, np.uint32), jnp.array([1])], ids=repr)
def test_keys_of_another_kind_are_refused(key):
    with pytest.raises(InvalidSampling, match="key is"):
        ij.generate(
            model().params,
            model().config,
            GOOD,
            key=key,
            max_new_tokens=1,
            sampling=ij.SamplingParams(),
        )


def test_stream_takes_one_flat_prompt():
    with pytest.raises(ShapeError, match="prompt_ids"):
        ij.stream(model(), [[1, 2]])


@pytest.mark.parametrize("taps", [(), ("final",), ["final"]], ids=repr)
def test_taps_may_be_lists(taps):
    assert set(ij.activations(model().params, model().config, GOOD, taps=tuple(taps))) == set(taps)


def test_taps_that_do_not_exist_are_refused():
    with pytest.raises(InvalidInput, match=r"layers\.99"):
        ij.activations(model().params, model().config, GOOD, taps=("layers.99",))


def test_status_of_no_known_kind_still_raises():
    with pytest.raises(InferjaxError, match="row 1"):
        ij.raise_for_status([0, 1 << 20])


def sample_arguments(**changes):
    values = {
        "logits": jnp.zeros((2, 40)),
        "sampling": ij.make_sampling(2, temperature=0.0),
        "state": make_state(jax.random.split(jax.random.key(0), 2), 1),
        **changes,
    }
    return values["logits"], values["sampling"], values["state"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logits": jnp.zeros((2, 40), jnp.int32)}, "int32"),
        ({"logits": jnp.zeros((2, 0))}, r"\(2, 0\)"),
        ({"logits": jnp.zeros(40)}, r"\(40,\)"),
        ({"logits": jnp.zeros((3, 40))}, "3 rows"),
        ({"sampling": ij.SamplingParams()}, "sampling is a SamplingParams"),
        ({"state": None}, "state is a NoneType"),
        ({"sampling": ij.make_sampling(2, token_mask=jnp.zeros((2, 7), jnp.uint32))}, "7"),
        ({"sampling": ij.make_sampling(2, token_mask=jnp.zeros((2, 2)))}, "float32"),
    ],
    ids=str,
)
def test_sample_refuses_arrays_of_another_kind(changes, named):
    with pytest.raises(ShapeError, match=named):
        check_shapes(*sample_arguments(**changes))


def test_make_sampling_refuses_values_for_other_rows():
    with pytest.raises(ShapeError, match="2 rows"):
        ij.make_sampling(2, temperature=[0.1, 0.2, 0.3])
