"""GGUF files in the layouts of other versions of the converter give the same model."""

import gguf
import jax
import numpy as np
import pytest
from tiny_models import TINY

from inferjax.checkpoint.load import load
from inferjax.errors import CheckpointError

FILES = TINY.parent / "tiny_gguf"


def rewrite(name, path, change, keys=None):
    """Write a tiny file again in float32, its tensors changed, and its metadata by `keys`."""
    reader = gguf.GGUFReader(FILES / f"{name}.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    changed = {f"{architecture}.{key}": value for key, value in (keys or {}).items()}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in changed:
            continue
        kinds = [*field.types, None]
        writer.add_key_value(key, field.contents(), kinds[0], kinds[1])
    for key, value in changed.items():
        if value is not None:
            writer.add_uint32(key, value)
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for tensor in reader.tensors:
        stored[tensor.name] = stored[tensor.name].reshape(tensor.shape[::-1].tolist())
    for key, values in change(stored).items():
        writer.add_tensor(key, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(path, name):
    ours, theirs = load(path), load(FILES / f"{name}.gguf")
    assert ours.config == theirs.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def experts_apart(stored):
    out = {}
    for name, values in stored.items():
        if "_exps." not in name:
            out[name] = values
        else:
            out |= {name.replace("_exps.", f".{i}."): one for i, one in enumerate(values)}
    return out


def gates_beside_ups(stored):
    out = {
        k: v for k, v in stored.items() if not k.endswith(("gate_exps.weight", "up_exps.weight"))
    }
    for name in stored:
        if name.endswith("ffn_gate_exps.weight"):
            pair = [stored[name], stored[name.replace("gate", "up")]]
            out[name.replace("gate_exps", "gate_up_exps")] = np.concatenate(pair, axis=1)
    return out


def projections_fused(stored):
    out = {
        k: v for k, v in stored.items() if k.split(".")[-2] not in ("attn_q", "attn_k", "attn_v")
    }
    for name in stored:
        if ".attn_q." in name:
            parts = [stored[name.replace("attn_q", f"attn_{which}")] for which in "qkv"]
            out[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    return out


def axes_of_one_dropped(stored):
    return {name: values.squeeze() for name, values in stored.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral_window", experts_apart),
        ("qwen2_moe", experts_apart),
        ("mixtral_window", gates_beside_ups),
        ("qwen2_moe", gates_beside_ups),
        ("qwen2_moe", axes_of_one_dropped),
        ("llama", projections_fused),
        ("qwen2", projections_fused),
    ],
)
def test_other_layouts_give_the_same_model(tmp_path, name, change):
    assert_same(rewrite(name, tmp_path / "m.gguf", change), name)


def test_deepseek_before_its_expansion_was_split(tmp_path):
    def joined(stored):
        out = {k: v for k, v in stored.items() if not k.endswith(("k_b.weight", "v_b.weight"))}
        for name in stored:
            if name.endswith("attn_k_b.weight"):
                keys, values = stored[name], stored[name.replace("k_b", "v_b")]
                both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
                out[name.replace("k_b", "kv_b")] = both.reshape(-1, both.shape[-1])
        return out

    old = {
        "attention.head_count_kv": 4,
        "attention.key_length": 24,
        "attention.value_length": 16,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    name = "deepseek_v2_lite"
    assert_same(rewrite(name, tmp_path / "m.gguf", joined, old), name)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda stored: {k: v[:3] if "_exps" in k else v for k, v in stored.items()}, "misshapen"),
        (lambda stored: {k: v for k, v in stored.items() if "up_exps" not in k}, "missing"),
        (lambda stored: {**stored, "blk.0.ffn_gate.weight": np.ones((4, 4))}, "unexpected"),
        (lambda stored: {**stored, "blk.0.ffn_gate_up_exps.weight": np.ones(4)}, "unexpected"),
    ],
)
def test_other_experts_than_the_metadata_says_are_refused(tmp_path, change, found):
    path = rewrite("mixtral_window", tmp_path / "m.gguf", change)
    with pytest.raises(CheckpointError) as error:
        load(path)
    problems = {k: getattr(error.value, k) for k in ("missing", "misshapen", "unexpected")}
    assert [kind for kind, names in problems.items() if names] == [found]
    assert "blk.0.ffn_" in str(error.value)
