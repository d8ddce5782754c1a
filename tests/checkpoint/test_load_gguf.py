"""GGUF against safetensors: the same tiny models, written by the format's own library."""

import json

import gguf
import jax
import numpy as np
import pytest

from inferjax.checkpoint.load import config_only, load
from inferjax.checkpoint.opened import open_checkpoint
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.errors import CheckpointError, UnsupportedConfig, UnsupportedModel
from inferjax.layers.rope import inverse_frequencies

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def permute(values, heads):
    """Interleave a head's two halves, as the converter does for llama's queries and keys."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write(tiny, path, name, *, metadata=None, tensors=None):
    """Convert a tiny checkpoint to a float32 GGUF file."""
    raw = json.loads((tiny / name / "config.json").read_text())
    arch = "llama" if raw["model_type"] == "llama" else "gemma3"
    writer = gguf.GGUFWriter(path, arch)
    fields = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "rope.freq_base": raw["rope_theta"],
        **({"attention.sliding_window": raw["sliding_window"]} if arch == "gemma3" else {}),
        **(metadata or {}),
    }
    for key, value in fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{arch}.{key}", value)
    add_vocabulary(writer, raw["vocab_size"])
    for key, values in (converted(tiny / name, raw, arch) | (tensors or {})).items():
        writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_vocabulary(writer, size):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"w{i}" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (size - 259))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    writer.add_file_type(0)


def converted(folder, raw, arch):
    file = open_safetensors(folder)
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    names = LLAMA_NAMES if arch == "llama" else GEMMA_NAMES
    out = {}
    for name in file.entries:
        values = file.read(name).astype(np.float32)
        part, leaf = name.rsplit(".", 1)
        if arch == "llama" and part.split(".")[-1] in heads:
            values = permute(values, heads[part.split(".")[-1]])
        if arch == "gemma3" and part.endswith("norm"):
            values = values + 1
        block = ""
        if part.startswith("model.layers."):
            _, _, index, part = part.split(".", 3)
            block = f"blk.{index}."
        out[f"{block}{names[part]}.{leaf}"] = values
    return out


def assert_close_trees(left, right, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), left, right)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_both_formats_give_one_model(tiny, tmp_path, name):
    path = write(tiny, tmp_path / "model.gguf", name)
    ours, theirs = load(path), load(tiny / name)
    # One is added to Gemma's norms and taken away again: half a unit in the last place of 2.
    assert_close_trees(ours.params, theirs.params, atol=0.0 if name == "llama" else 2e-7)
    assert ours.tokenizer is not None
    assert ours.family == theirs.family
    left, right = (m.config.layers[0].attention for m in (ours, theirs))
    assert (left.rope, left.window, left.scale) == (right.rope, right.window, right.scale)
    assert [s.group for s in ours.config.layers] == [s.group for s in theirs.config.layers]
    assert ours.config.embed_scale == theirs.config.embed_scale
    assert ours.config.tied == theirs.config.tied
    assert (ours.config.bos_id, ours.config.eos_ids) == (1, (2, 7))
    assert_same_shapes(config_only(path), theirs.config)


def assert_same_shapes(left, right):
    for key in ("family", "vocab_size", "model_dim", "max_context", "num_layers"):
        assert getattr(left, key) == getattr(right, key)


def test_a_folder_with_one_gguf_is_that_file(tiny, tmp_path):
    path = write(tiny, tmp_path / "model.gguf", "llama")
    assert open_checkpoint(tmp_path).path == path


def test_llama3_factors_come_from_their_tensor(tiny, tmp_path):
    raw = json.loads((tiny / "llama3_rope" / "config.json").read_text())
    expected = load(tiny / "llama3_rope")
    rope = expected.config.layers[0].attention.rope
    plain = raw["rope_theta"] ** (-np.arange(8) / 8)
    factors = (plain / inverse_frequencies(rope)[0]).astype(np.float32)
    tensors = {"rope_freqs.weight": factors}
    model = load(write(tiny, tmp_path / "m.gguf", "llama3_rope", tensors=tensors))
    got, scale = inverse_frequencies(model.config.layers[0].attention.rope)
    np.testing.assert_allclose(got, inverse_frequencies(rope)[0], rtol=1e-6)
    assert scale == 1.0
    assert_close_trees(model.params, expected.params)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, ("linear", 4.0, 0)),
        ({"rope.scale_linear": 2.0}, ("linear", 2.0, 0)),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            },
            ("yarn", 4.0, 64),
        ),
        ({"rope.scaling.type": "none"}, ("none", 1.0, 0)),
    ],
)
def test_rope_scaling_is_read(tiny, tmp_path, scaling, expected):
    path = write(tiny, tmp_path / "m.gguf", "llama", metadata=scaling)
    rope = config_only(path).layers[0].attention.rope
    assert (rope.scaling, rope.factor, rope.original_context) == expected


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"expert_count": 8}, "expert_used_count"),
        ({"expert_used_count": 2}, "expert_used_count"),
        ({"attention.value_length": 8}, "value_length"),
        ({"rope.dimension_count": 8}, "dimension_count"),
        ({"rope.scaling.type": "longrope"}, "scaling.type"),
        ({"attention.head_count": 2**31}, "head_count"),
        ({"block_count": 0}, "block_count"),
        ({"embedding_length": 1.5}, "embedding_length"),
    ],
)
def test_metadata_that_would_change_the_result_is_refused(tiny, tmp_path, metadata, named):
    path = write(tiny, tmp_path / "m.gguf", "llama", metadata=metadata)
    with pytest.raises(UnsupportedConfig, match=named):
        load(path)


def test_gemma_pattern_and_softcap_are_read(tiny, tmp_path):
    metadata = {"attention.sliding_window_pattern": 3, "final_logit_softcapping": 30.0}
    path = write(tiny, tmp_path / "m.gguf", "gemma3_text", metadata=metadata)
    config = config_only(path)
    assert [s.attention.window for s in config.layers] == [8, 8, None, 8, 8, None]
    assert config.final_softcap == 30.0


def test_missing_and_extra_tensors_are_named_as_stored(tiny, tmp_path):
    extra = {"blk.7.attn_q.weight": np.zeros((4, 4), np.float32)}
    path = write(tiny, tmp_path / "m.gguf", "llama", metadata={"block_count": 4}, tensors=extra)
    with pytest.raises(CheckpointError, match=r"9 missing: 'blk\.3\.") as error:
        load(path)
    assert error.value.unexpected == ["blk.7.attn_q.weight"]


def test_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"mamba.*\n.*gemma3, .*llama"):
        load(tmp_path / "m.gguf")
