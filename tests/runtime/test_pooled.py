"""`embed` and `classify`: pooling, exactness, composition, and who may call them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_models import padded, prompts_of, tiny_model
from tolerances import CHUNKED_GRADIENTS_F32, LOGITS_F32

import inferjax as ij
from inferjax.checkpoint.load import Model
from inferjax.errors import (
    InvalidInput,
    RequestTooLong,
    ShapeError,
    UnsupportedConfig,
    UnsupportedModel,
)


def one_layer(folder: str) -> Model:
    """Return a tiny model's first layer with its head: it compiles in a third of the time."""
    model = tiny_model(folder)
    return dataclasses.replace(
        model,
        params=dataclasses.replace(model.params, layers=model.params.layers[:1]),
        config=dataclasses.replace(model.config, layers=model.config.layers[:1]),
    )


EMBEDDER, CLASSIFIER = one_layer("llama_embedding"), one_layer("llama_classifier")
LENGTHS = (9, 4, 1)
TOKENS = padded(prompts_of(EMBEDDER, LENGTHS), 9)
DEFAULT, EXACT = ij.Exec(), ij.Exec(exact=True, page_size=8, tile=4)
POOLINGS = [
    ij.Pooling(kind=kind, normalize=normalize)
    for kind in ("last", "mean", "first")
    for normalize in (False, True)
]


def embed(tokens, lengths, pooling=None, exec=DEFAULT):
    return np.asarray(
        ij.embed(EMBEDDER.params, EMBEDDER.config, tokens, lengths, pooling=pooling, exec=exec)
    )


def classify(tokens, lengths):
    return np.asarray(ij.classify(CLASSIFIER.params, CLASSIFIER.config, tokens, lengths))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_of_final_states(pooling):
    states = ij.activations(EMBEDDER.params, EMBEDDER.config, TOKENS, LENGTHS, taps=("final",))
    rows = [
        {"last": row[n - 1], "mean": row[:n].mean(0), "first": row[0]}[pooling.kind]
        for row, n in zip(np.asarray(states["final"]), LENGTHS, strict=True)
    ]
    wanted = np.stack(rows)
    if pooling.normalize:
        wanted = wanted / np.linalg.norm(wanted, axis=-1, keepdims=True)
    np.testing.assert_allclose(embed(TOKENS, LENGTHS, pooling), wanted, **LOGITS_F32)


def test_a_checkpoint_without_pooling_gives_its_last_state():
    model = one_layer("llama")
    assert model.config.pooling is None
    states = ij.activations(model.params, model.config, TOKENS, LENGTHS, taps=("final",))["final"]
    vectors = ij.embed(model.params, model.config, TOKENS, LENGTHS)
    np.testing.assert_allclose(vectors, states[np.arange(3), np.array(LENGTHS) - 1], **LOGITS_F32)


def test_padding_and_batch_mates_have_no_effect_on_exact_bits():
    wide = padded(prompts_of(EMBEDDER, (*LENGTHS, 14, 14)), 14, fill=7)
    pooling = ij.Pooling(kind="mean", normalize=True)
    among = embed(wide, (*LENGTHS, 14, 14), pooling, EXACT)
    for row in (0, 2):
        alone = embed(TOKENS[row : row + 1, : LENGTHS[row]], LENGTHS[row], pooling, EXACT)
        assert alone.tobytes() == among[row : row + 1].tobytes(), row
    # With 16 labels XLA:CPU multiplies one row alone by other code than several.
    labels = jax.random.normal(jax.random.key(0), (16, CLASSIFIER.config.model_dim))
    params = dataclasses.replace(CLASSIFIER.params, labels=labels)
    config = dataclasses.replace(CLASSIFIER.config, labels=tuple("abcdefghijklmnop"))
    among = ij.classify(params, config, TOKENS, LENGTHS, exec=EXACT)
    alone = ij.classify(params, config, TOKENS[:1], exec=EXACT)
    assert np.asarray(alone).tobytes() == np.asarray(among[:1]).tobytes()


def test_a_row_with_an_id_outside_the_vocabulary_is_nan_alone():
    bad = TOKENS.copy()
    bad[1, 2], bad[2, 5] = 10_000, -1  # the latter is padding
    vectors = jax.jit(lambda t: ij.embed(EMBEDDER.params, EMBEDDER.config, t, LENGTHS))(bad)
    logits = jax.jit(lambda t: ij.classify(CLASSIFIER.params, CLASSIFIER.config, t, LENGTHS))(bad)
    for got in (np.asarray(vectors), np.asarray(logits)):
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("length", [0, -1, 10])
def test_a_traced_length_out_of_range_makes_its_row_nan(length):
    lengths = jnp.array([9, length, 1])
    run = jax.jit(lambda n: ij.embed(EMBEDDER.params, EMBEDDER.config, TOKENS, n))
    vectors = np.asarray(run(lengths))
    assert np.isnan(vectors[1]).all()
    assert np.isfinite(vectors[[0, 2]]).all()


def test_both_map_over_stacked_weights():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x * jnp.asarray(0.5, x.dtype)]), EMBEDDER.params)
    many = jax.vmap(lambda p: ij.embed(p, EMBEDDER.config, TOKENS, LENGTHS))(stacked)
    half = jax.tree.map(lambda x: x[1], stacked)
    one = ij.embed(half, EMBEDDER.config, TOKENS, LENGTHS)
    np.testing.assert_allclose(many[0], embed(TOKENS, LENGTHS), **LOGITS_F32)
    np.testing.assert_allclose(many[1], one, **LOGITS_F32)


def test_gradients_of_a_contrastive_loss_do_not_see_padding():
    def loss(params, tokens):
        pooling = ij.Pooling(kind="mean", normalize=True)
        a = ij.embed(params, EMBEDDER.config, tokens, LENGTHS, pooling=pooling)
        return (a @ a.T)[0, 1]

    grads = jax.jit(jax.grad(loss))
    wide = np.pad(TOKENS, ((0, 0), (0, 4)), constant_values=5)
    for one, other in zip(
        jax.tree.leaves(grads(EMBEDDER.params, TOKENS)),
        jax.tree.leaves(grads(EMBEDDER.params, wide)),
        strict=True,
    ):
        scale = float(jnp.abs(one).max())
        assert scale > 0
        np.testing.assert_allclose(one / scale, other / scale, **CHUNKED_GRADIENTS_F32)


def test_the_gradient_of_a_label_reaches_every_weight():
    def loss(params):
        return ij.classify(params, CLASSIFIER.config, TOKENS, LENGTHS)[:, 1].sum()

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(CLASSIFIER.params)):
        assert np.isfinite(leaf).all()
        assert np.asarray(leaf).any()


def test_rows_stay_sharded_on_an_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    tokens, lengths = np.tile(TOKENS, (8, 1))[:8], np.tile(LENGTHS, 8)[:8]
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    for model, run in ((EMBEDDER, ij.embed), (CLASSIFIER, ij.classify)):
        params = jax.device_put(model.params, everywhere)
        got = run(params, model.config, jax.device_put(tokens, rows), jax.device_put(lengths, rows))
        assert jax.typeof(got).sharding.spec == PartitionSpec("data", None)
        np.testing.assert_allclose(
            got, run(model.params, model.config, tokens, lengths), **LOGITS_F32
        )


def test_half_precision_weights_give_float32_vectors():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), EMBEDDER.params)
    for pooling in POOLINGS[:3:2]:
        vectors = ij.embed(half, EMBEDDER.config, TOKENS, LENGTHS, pooling=pooling)
        assert vectors.dtype == jnp.float32
        wanted = embed(TOKENS, LENGTHS, pooling)
        assert np.abs(vectors - wanted).std() < 0.05 * wanted.std()


def test_opt_vectors_have_the_width_of_the_embedding():
    model = one_layer("opt_post_norm")
    width = model.config.embed_dim
    assert width != model.config.model_dim
    for exec in (ij.Exec(), EXACT):
        vectors = ij.embed(model.params, model.config, TOKENS, LENGTHS, exec=exec)
        assert vectors.shape == (3, width)


def test_functions_for_tokens_refuse_models_without_a_vocabulary_head():
    for model, hint in ((CLASSIFIER, "use classify"), (EMBEDDER, "use embed")):
        weights = (model.params, model.config)
        calls = [
            lambda w=weights: ij.generate(*w, TOKENS, LENGTHS, max_new_tokens=1),
            lambda w=weights: ij.beam_search(*w, TOKENS, LENGTHS, num_beams=2, max_new_tokens=1),
            lambda w=weights: ij.forward(*w, TOKENS, LENGTHS),
            lambda w=weights: ij.score(*w, TOKENS, LENGTHS),
            lambda m=model: ij.stream(m, TOKENS[0]),
            lambda m=model: ij.Engine(m),
        ]
        for call in calls:
            with pytest.raises(UnsupportedModel, match=hint):
                call()


def test_classify_refuses_models_without_labels():
    for model in (EMBEDDER, tiny_model("llama")):
        with pytest.raises(UnsupportedModel, match="labels"):
            ij.classify(model.params, model.config, TOKENS, LENGTHS)


@pytest.mark.parametrize("fields", [{"kind": "max"}, {"kind": []}, {"normalize": 1}])
def test_unknown_pooling_is_refused(fields):
    with pytest.raises(UnsupportedConfig, match="last, mean, first"):
        ij.Pooling(**fields)


@pytest.mark.parametrize(
    ("tokens", "lengths", "error"),
    [
        (TOKENS[0], None, ShapeError),
        (TOKENS.astype(np.float32), None, ShapeError),
        (TOKENS, [9, 4], ShapeError),
        (TOKENS, [9, 4, 0], InvalidInput),
        (TOKENS + 1_000, None, InvalidInput),
        (np.ones((1, 300), np.int32), None, RequestTooLong),
    ],
)
def test_bad_arguments_are_typed_errors(tokens, lengths, error):
    for run in (embed, classify):
        with pytest.raises(error):
            run(tokens, lengths)
