"""Configurations without a reference checkpoint, against float64 NumPy in Hugging Face's layout."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_numpy import numpy_logits
from safetensors.numpy import save_file

from inferjax.checkpoint.load import load
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.models.family import read_config
from inferjax.models.registry import family_for
from inferjax.models.sources import Source
from inferjax.runtime.score import forward

NAMES = ("llama", "llama3_rope", "llama_yarn", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2")
# float32 through a few layers against float64, in units of the logits' standard deviation.
TOLERANCE = 1e-4
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = [
    (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "hidden_act": "gelu",
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    ),
    (
        "llama",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "longrope",
                "long_factor": [1.0 + i for i in range(8)],
                "short_factor": [1.0] * 8,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 40,
            "sliding_window_pattern": 2,
            "sliding_window": 3,
            "num_key_value_heads": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    (
        "gpt_oss",
        {
            "attention_bias": False,
            "swiglu_limit": 0.3,
            "swiglu_alpha": 1.3,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 1,
        },
    ),
    (
        "deepseek_v3",
        {"q_lora_rank": None, "attention_bias": True, "n_group": 4, "topk_group": 2},
    ),
    (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "n_group": 1,
            "num_experts_per_tok": 3,
            "rms_norm_eps": 1e-3,
            "rope_scaling": YARN,
        },
    ),
    ("deepseek_v3", {"rope_scaling": YARN, "v_head_dim": 24, "first_k_dense_replace": 0}),
    (
        "gpt2",
        {
            "tie_word_embeddings": False,
            "n_inner": 100,
            "activation_function": "relu",
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_numpy_families_agree_with_hugging_face(tiny, name):
    raw = json.loads((tiny / name / "config.json").read_text())
    file = open_safetensors(tiny / name)
    weights = {key: np.float32(file.read(key)) for key in file.entries}
    expected = np.load(tiny / name / "expected.npz")
    config = read_config(family_for(raw["model_type"]), raw)
    logits = numpy_logits(raw, config, weights, expected["tokens"][0])
    assert_close(logits, expected["logits"][0])


@pytest.mark.parametrize(("name", "change"), VARIANTS)
def test_variant_equals_numpy(tiny, tmp_path, rng, name, change):
    raw = json.loads((tiny / name / "config.json").read_text()) | change
    raw["n_layer" if name == "gpt2" else "num_hidden_layers"] = 2
    weights = draw(raw, rng)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load(tmp_path)
    tokens = rng.integers(0, 320, 24)
    logits = forward(model.params, model.config, jnp.asarray(tokens[None], jnp.int32))
    assert_close(np.asarray(logits[0]), numpy_logits(raw, model.config, weights, tokens))


def draw(raw, rng):
    """Draw weights for every tensor that the family asks for, large enough for all to matter."""
    family = family_for(raw["model_type"])
    sources = jax.tree.leaves(
        family.weights(read_config(family, raw)), is_leaf=lambda node: isinstance(node, Source)
    )
    out = {}
    for tensor in dict.fromkeys(t for source in sources for t in source.tensors):
        values = rng.normal(size=tensor.shape).astype(np.float32)
        scale = 0.3 if len(tensor.shape) == 1 else tensor.shape[-1] ** -0.5
        is_norm = "norm" in tensor.name or ".ln_" in tensor.name
        offset = is_norm and tensor.name.endswith("weight") and raw["model_type"] != "gemma3_text"
        out[tensor.name] = values * np.float32(scale) + np.float32(offset)
    return out


def assert_close(got, expected):
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < TOLERANCE * expected.std()
