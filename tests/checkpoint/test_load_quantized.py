"""Loading AWQ and GPTQ checkpoints: as arrays, packed, and the error that each bad one gets."""

import json

import jax
import numpy as np
import pytest
from make_quantized import DOWN, LLAMA, Q, Recipe, swap_layer, write_pair
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file, save_file
from tolerances import PARITY_LOGITS_F32

import inferjax as ij
from inferjax.checkpoint.load import load
from inferjax.errors import CheckpointError, UnsupportedModel
from inferjax.models.quantized import dequantize
from inferjax.quant.leaf import is_packed

QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN2 |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 1}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
QWEN3_MOE = LLAMA | QWEN3_MOE | {"use_sliding_window": False}
PHI3 = LLAMA | {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}
PHI3 |= {"pad_token_id": None, "original_max_position_embeddings": 256}
MODELS = {"llama": LLAMA, "qwen2": QWEN2, "qwen3_moe": QWEN3_MOE, "phi3": PHI3}


def assert_equal_trees(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def edit(folder, change):
    """Change a checkpoint's tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    kept = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    save_file(kept, folder / "model.safetensors")


def edit_config(folder, **keys):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "recipe",
    [Recipe(method="awq", group=16), Recipe(act_order=True), Recipe(symmetric=True, keep=("v_",))],
    ids=["awq", "act-order", "symmetric"],
)
def test_weights_equal_those_of_the_dequantized_checkpoint(tmp_path, name, recipe):
    packed, plain = write_pair(tmp_path, MODELS[name], recipe)
    known = load(plain, dtype="float32")
    assert_equal_trees(load(packed, dtype="float32").params, known.params)
    model = load(packed)
    assert_equal_trees(dequantize(model.params), known.params)
    assert model.config.layers == known.config.layers
    assert model.raw["quantization_config"]["bits"] == 4


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("llama", Recipe(act_order=True, symmetric=True, group=40)),
        ("qwen2", Recipe(method="awq", group=16)),
        ("qwen3_moe", Recipe(act_order=True, version=2, group=16)),
    ],
    ids=["act-order", "awq", "experts"],
)
def test_logits_equal_those_of_the_dequantized_weights(tmp_path, name, recipe):
    packed, plain = (load(folder) for folder in write_pair(tmp_path, MODELS[name], recipe))
    layer = packed.params.layers[0]
    products = [layer.attention.wqkv, layer.attention.wo, layer.ffn.w_in, layer.ffn.w_down]
    assert all(map(is_packed, products))
    assert all((leaf.permutation is not None) == recipe.act_order for leaf in products)
    tokens = np.arange(24).reshape(2, 12) * 11 % 320
    logits = ij.forward(packed.params, packed.config, tokens)
    wide = ij.forward(plain.params, plain.config, tokens)
    assert np.abs(logits - wide).max() <= PARITY_LOGITS_F32 * np.std(wide)


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq_act_order", "gptq_3_bits"])
def test_files_of_the_tools_give_their_logits(root, name):
    """Packed by AutoAWQ and AutoGPTQ, computed by transformers from what they unpack."""
    folder = root / "checkpoints" / "tiny_quantized" / name
    model = load(folder)
    assert is_packed(model.params.layers[0].attention.wo)
    with np.load(folder / "expected.npz") as known:
        tokens, logits = known["tokens"], known["logits"]
    found = ij.forward(model.params, model.config, tokens)
    assert np.abs(found - logits).max() <= PARITY_LOGITS_F32 * np.std(logits)


def test_parts_of_a_product_in_different_orders_are_dequantized(tmp_path):
    """A leaf is multiplied with one gathered vector: different orders have no packed form."""
    packed, plain = write_pair(tmp_path, LLAMA, Recipe(act_order=True))
    other, other_plain = write_pair(tmp_path / "b", LLAMA, Recipe(act_order=True), seed=1)
    swap_layer(packed, other, Q)
    swap_layer(plain, other_plain, Q)
    params = load(packed).params
    attention = params.layers[0].attention
    assert not is_packed(attention.wqkv)
    assert is_packed(attention.wo)
    assert_equal_trees(dequantize(params), load(plain, dtype="float32").params)


def test_every_expert_has_an_order_of_its_own(tmp_path):
    packed, plain = write_pair(tmp_path, QWEN3_MOE, Recipe(act_order=True))
    other, other_plain = write_pair(tmp_path / "b", QWEN3_MOE, Recipe())
    for part in ("gate_proj", "up_proj"):
        layer = f"model.layers.0.mlp.experts.1.{part}"
        swap_layer(packed, other, layer)
        swap_layer(plain, other_plain, layer)
    params = load(packed).params
    orders = np.asarray(params.layers[0].ffn.w_in.permutation)
    assert_array_equal(np.sort(orders, axis=1), np.broadcast_to(np.arange(64), (4, 64)))
    assert_array_equal(orders[1], np.arange(64))
    assert len(np.unique(orders, axis=0)) == 4
    assert_equal_trees(dequantize(params), load(plain, dtype="float32").params)


def test_codes_and_orders_are_saved_and_loaded(tmp_path):
    model = load(write_pair(tmp_path, LLAMA, Recipe(act_order=True))[0])
    params = load(ij.save(model, tmp_path / "saved")).params
    assert jax.tree.structure(params) == jax.tree.structure(model.params)
    assert_equal_trees(params, model.params)


def test_arrays_are_rounded_once(tmp_path):
    packed, plain = write_pair(tmp_path, LLAMA, Recipe())
    assert_equal_trees(load(packed, dtype="bfloat16").params, load(plain, dtype="bfloat16").params)


@pytest.mark.parametrize(
    ("name", "recipe", "keys"),
    [
        ("quantize_config.json", Recipe(act_order=True), {}),
        (
            "quant_config.json",
            Recipe(method="awq"),
            {"group_size": "q_group_size", "bits": "w_bit"},
        ),
    ],
)
def test_older_files_say_how_weights_are_quantized(tmp_path, name, recipe, keys):
    packed, plain = write_pair(tmp_path, LLAMA, recipe)
    raw = json.loads((packed / "config.json").read_text())
    found = raw.pop("quantization_config")
    del found["quant_method"]
    found = {keys.get(key, key): value for key, value in found.items()}
    (packed / "config.json").write_text(json.dumps(raw))
    (packed / name).write_text(json.dumps(found))
    assert_equal_trees(load(packed, dtype="float32").params, load(plain, dtype="float32").params)
    # What config.json says itself goes first.
    edit_config(packed, quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedModel, match="hqq"):
        load(packed)


def test_biases_of_zero_that_the_model_lacks_are_left_out(tmp_path):
    packed, plain = write_pair(tmp_path, LLAMA, Recipe())
    edit(packed, lambda tensors: tensors.update({f"{Q}.bias": np.zeros(64, np.float16)}))
    assert_equal_trees(load(packed, dtype="float32").params, load(plain, dtype="float32").params)
    edit(packed, lambda tensors: tensors.update({f"{Q}.bias": np.eye(1, 64, dtype=np.float16)[0]}))
    with pytest.raises(CheckpointError, match=f"1 unexpected: '{Q}.bias'"):
        load(packed)


def test_weights_stored_the_other_way_round_are_refused(tmp_path, tiny):
    packed, _ = write_pair(tmp_path, LLAMA, Recipe())
    raw = json.loads((tiny / "gpt2" / "config.json").read_text())
    found = json.loads((packed / "config.json").read_text())["quantization_config"]
    (packed / "config.json").write_text(json.dumps(raw | {"quantization_config": found}))
    with pytest.raises(UnsupportedModel, match="gpt2 is quantized as gptq"):
        load(packed)


def put(part, change, layer=Q):
    """Return an edit of one of a layer's tensors."""

    def edit(tensors):
        name = f"{layer}.{part}"
        tensors[name] = change(tensors[name])

    return edit


def drop(part):
    return lambda tensors: tensors.pop(f"{Q}.{part}")


def at(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


SPOILED = {
    "no scales": (drop("scales"), "scales' is missing"),
    "no zeros": (drop("qzeros"), "qzeros' is missing"),
    "no groups": (drop("g_idx"), "g_idx' is missing"),
    "no codes": (drop("qweight"), "1 missing.*q_proj.weight.*unexpected.*q_proj.g_idx"),
    "a weight too": (
        lambda tensors: tensors.update({f"{Q}.weight": np.zeros((64, 64), np.float16)}),
        "weight' is beside '.*qweight'",
    ),
    "codes of int8": (put("qweight", lambda a: a.astype(np.int8)), "qweight' is int8"),
    "zeros of int64": (put("qzeros", lambda a: a.astype(np.int64)), "qzeros' is int64"),
    "scales of int32": (put("scales", lambda a: a.astype(np.int32)), "scales' is int32"),
    "groups of float32": (put("g_idx", lambda a: a.astype(np.float32)), "g_idx' is float32"),
    "codes cut": (put("qweight", lambda a: a[:-1]), "g_idx' has the shape"),
    "codes of another layer": (put("qweight", lambda a: a[:, :-8]), "qweight' has the shape"),
    "a group too few": (put("scales", lambda a: a[:-1]), "scales' has the shape"),
    "outputs that fill no word": (put("scales", lambda a: a[:, :-1]), "has 63 outputs"),
    "zeros cut": (put("qzeros", lambda a: a[:, :-1]), "qzeros' has the shape"),
    "zeros of one axis": (put("qzeros", lambda a: a[0]), "qzeros' has the shape"),
    "no outputs": (put("scales", lambda a: a[:, :0]), "scales' has the shape"),
    "groups cut": (put("g_idx", lambda a: a[:-1]), "g_idx' has the shape"),
    "a group that does not exist": (put("g_idx", at(3, 2)), "g_idx' gives inputs to groups"),
    "a negative group": (put("g_idx", at(3, -1)), "g_idx' gives inputs to groups"),
    "a group too large": (put("g_idx", at(slice(None), 0)), "g_idx' gives inputs to groups"),
    "a scale that is NaN": (put("scales", at((1, 5), np.nan)), "32 of 4096 values that are NaN"),
    "a scale that is infinite": (put("scales", at((1, 5), np.inf)), "values that are NaN or"),
    "both layers of another width": (
        lambda tensors: [
            put(part, lambda a: a[: len(a) // 2], DOWN)(tensors)
            for part in ("qweight", "qzeros", "g_idx")
        ],
        "scales' has the shape",
    ),
}


@pytest.mark.parametrize(("spoil", "text"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_layer_is_named(tmp_path, spoil, text):
    packed, _ = write_pair(tmp_path, LLAMA, Recipe(act_order=True))
    edit(packed, spoil)
    with pytest.raises(CheckpointError, match=text):
        load(packed)
    with pytest.raises(CheckpointError, match=text):
        load(packed, dtype="float32")


def test_promises_of_the_config_are_kept(tmp_path):
    packed, _ = write_pair(tmp_path / "a", LLAMA, Recipe(act_order=True))
    found = json.loads((packed / "config.json").read_text())["quantization_config"]
    for dtype in (None, "float32"):
        edit_config(packed, quantization_config=found | {"desc_act": False})
        with pytest.raises(CheckpointError, match=r"g_idx' puts inputs into groups out of order"):
            load(packed, dtype=dtype)
        edit_config(packed, quantization_config=found | {"sym": True})
        with pytest.raises(CheckpointError, match=r"qzeros' has zeros other than 8"):
            load(packed, dtype=dtype)


def test_a_layer_of_another_config_is_told_by_its_shape(tmp_path):
    packed, _ = write_pair(tmp_path, LLAMA, Recipe(method="awq"))
    edit_config(packed, hidden_size=128)
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight' is \(64, 64\), expected \(128, 128\)"
    ):
        load(packed)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("qzeros", np.zeros((2, 1), np.int32), "0 bits for each of 64 outputs"),
        ("scales", np.ones((3, 64), np.float16), "has 3 groups"),
    ],
)
def test_shapes_that_imply_no_format_are_refused(tmp_path, part, value, text):
    recipe = Recipe(config={"dynamic": {"+:.*": {"bits": 8}}})
    packed, _ = write_pair(tmp_path, LLAMA, recipe)
    edit(packed, put(part, lambda _: value))
    with pytest.raises(CheckpointError, match=text):
        load(packed)


def test_scales_of_a_leaf_are_those_of_its_layer(tmp_path):
    packed, _ = write_pair(tmp_path, LLAMA, Recipe(method="awq"))
    tensors = load_file(packed / "model.safetensors")
    leaf = load(packed).params.layers[0].ffn.w_down
    assert leaf.matrix.format == "int4"
    scales = np.asarray(leaf.matrix.scales).transpose(1, 0, 2).reshape(3, -1)
    assert_array_equal(scales, tensors[f"{DOWN}.scales"].astype(np.float32))
