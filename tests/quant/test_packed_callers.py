"""Public functions on packed weights: they compute with their values, or say why they cannot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import expected, tiny_model
from tolerances import PACKED_LOGITS_RMS

import inferjax as ij
from inferjax.errors import ShapeError, UnsupportedConfig
from inferjax.models.tensors import tensors_from_params
from inferjax.nnx import Decoder, to_nnx

SCHEME = "int4-g64"
TOKENS = expected("llama")["tokens"].astype(np.int32)[:2, :6]


def one_layer(folder):
    model = tiny_model(folder)
    params = dataclasses.replace(model.params, layers=model.params.layers[:1])
    config = dataclasses.replace(model.config, layers=model.config.layers[:1])
    return dataclasses.replace(
        model, params=ij.quantize(params, config, SCHEME), config=config, tokenizer=None
    )


MODEL, CLASSIFIER = one_layer("llama"), one_layer("llama_classifier")


@pytest.mark.parametrize(
    ("model", "function"),
    [
        (MODEL, lambda p, c: ij.embed(p, c, TOKENS)),
        (MODEL, lambda p, c: ij.embed(p, c, TOKENS, pooling=ij.Pooling(kind="mean"))),
        (MODEL, lambda p, c: ij.activations(p, c, TOKENS, taps=("layers.0",))["layers.0"]),
        (CLASSIFIER, lambda p, c: ij.classify(p, c, TOKENS)),
        (
            MODEL,
            lambda p, c: ij.beam_search(p, c, TOKENS, num_beams=2, max_new_tokens=2).scores,
        ),
    ],
    ids=["embed", "embed-mean", "activations", "classify", "beam_search"],
)
def test_results_are_those_of_the_values(model, function):
    got = np.asarray(function(model.params, model.config))
    want = np.asarray(function(ij.dequantize(model.params), model.config))
    assert np.sqrt(np.mean((got - want) ** 2)) <= PACKED_LOGITS_RMS * np.std(want)


def test_arrays_beside_packed_weights_have_gradients():
    def loss(norm, params):
        params = dataclasses.replace(params, final_norm=norm)
        return ij.score(params, MODEL.config, TOKENS).sum()

    got = jax.grad(loss)(MODEL.params.final_norm, MODEL.params).weight
    want = jax.grad(loss)(MODEL.params.final_norm, ij.dequantize(MODEL.params)).weight
    assert np.sqrt(np.mean((got - want) ** 2)) <= PACKED_LOGITS_RMS * np.std(want)


@pytest.mark.parametrize(
    "function",
    [
        lambda: ij.fake_quantize(MODEL.params, MODEL.config, "int4"),
        lambda: tensors_from_params(MODEL.config, MODEL.params),
        lambda: to_nnx(MODEL.params, MODEL.config, Decoder(MODEL.config, rngs=nnx.Rngs(0))),
        lambda: ij.save(MODEL, "nowhere", format="safetensors"),
    ],
    ids=["fake_quantize", "tensors_from_params", "to_nnx", "save"],
)
def test_what_needs_arrays_says_how_to_get_them(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedConfig, match=r"embed is packed as int4") as caught:
        function()
    assert "quantize='none'" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_an_engine_takes_new_weights_that_are_packed_alike():
    arrays = ij.dequantize(MODEL.params)
    with ij.Engine(MODEL, ij.EngineConfig(max_running=1, num_pages=2, max_len=16)) as engine:
        for others in (arrays, ij.quantize(arrays, MODEL.config, "int8"), CLASSIFIER.params):
            with pytest.raises(ShapeError, match="not those of the same model"):
                engine.update_params(others)
        engine.update_params(jax.tree.map(jnp.zeros_like, MODEL.params))
