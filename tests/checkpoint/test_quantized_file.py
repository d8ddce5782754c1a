"""AWQ and GPTQ tensors read as weights: values and codes are exactly what the codes stand for."""

import dataclasses

import numpy as np
import pytest
from make_quantized import DOWN, LLAMA, Q, Recipe, swap_layer, write_pair
from numpy.testing import assert_array_equal

from inferjax.checkpoint.opened import open_checkpoint
from inferjax.checkpoint.quantized_file import QuantizedTensors

RECIPES = {
    "awq": Recipe(method="awq"),
    "awq of small groups": Recipe(method="awq", group=16),
    "awq of one group": Recipe(method="awq", group=-1),
    "awq of bfloat16 scales": Recipe(method="awq", scale_dtype="bfloat16"),
    "awq of float32 scales": Recipe(method="awq", scale_dtype="float32"),
    "symmetric": Recipe(symmetric=True),
    "symmetric with a short last group": Recipe(symmetric=True, group=40),
    "symmetric of eight bits": Recipe(symmetric=True, bits=8),
    "symmetric of bfloat16 scales": Recipe(symmetric=True, scale_dtype="bfloat16"),
    "zeros": Recipe(),
    "zeros, second version": Recipe(version=2),
    "zeros that borrow": Recipe(whole_words=True, config={"meta": {"quantizer": "gptqmodel:2.0"}}),
    "zeros of two bits": Recipe(bits=2),
    "zeros of three bits": Recipe(bits=3),
    "zeros of eight bits": Recipe(bits=8),
    "zeros of eight bits, one group": Recipe(bits=8, group=-1),
    "zeros of float32 scales": Recipe(scale_dtype="float32"),
    "zeros of eight bits, float32 scales": Recipe(bits=8, scale_dtype="float32"),
    "groups of an odd size": Recipe(group=12),
    "act-order": Recipe(act_order=True),
    "act-order with a short last group": Recipe(act_order=True, symmetric=True, group=40),
    "layers left out": Recipe(keep=("v_proj", "down_proj")),
}
# None: dequantized, no layout holds the values exactly.
LAYOUTS = {
    "awq": ("int4", 32, True, "float32"),
    "awq of one group": ("int4", 0, True, "float32"),
    "awq of float32 scales": ("int8", 32, False, "float32"),
    "symmetric": ("int4", 32, False, "float16"),
    "symmetric of eight bits": ("int8", 32, False, "float16"),
    "symmetric of bfloat16 scales": ("int4", 32, False, "float32"),
    "zeros of two bits": ("int4", 32, True, "float32"),
    "zeros of eight bits": ("int8", 32, True, "float32"),
    "zeros of eight bits, float32 scales": None,
    "groups of an odd size": None,
}


def open_pair(folder, recipe, raw=LLAMA):
    packed, plain = write_pair(folder, raw, recipe)
    return open_checkpoint(packed).file, open_checkpoint(plain).file


def rows_of(file, name):
    """Return the codes' values, with the inputs in their own order."""
    runs = list(file.codes(name))
    values = np.concatenate([run.values() for run in runs])
    order = file.entries[name].codes.order
    if order is None:
        return values
    out = np.empty_like(values)
    out[:, np.frombuffer(order, np.int32)] = values
    return out


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_values_and_codes_are_exact(tmp_path, recipe):
    file, known = open_pair(tmp_path, recipe)
    assert isinstance(file, QuantizedTensors)
    assert {(e.name, e.shape) for e in file.entries.values()} == {
        (e.name, e.shape) for e in known.entries.values()
    }
    for name, entry in file.entries.items():
        assert_array_equal(file.read(name), known.read(name))
        if entry.codes is not None:
            assert_array_equal(rows_of(file, name), known.read(name))


@pytest.mark.parametrize(("name", "wanted"), LAYOUTS.items())
def test_layout_is_the_smallest_that_is_exact(tmp_path, name, wanted):
    file, _ = open_pair(tmp_path, RECIPES[name])
    layout = file.entries[f"{Q}.weight"].codes
    if wanted is None:
        assert layout is None
    else:
        fields = (layout.format, layout.group, layout.minimum, layout.scale_dtype)
        assert fields == wanted


@pytest.mark.parametrize("begin", [0, 1, 64 * 5 + 3, 64 * 64 - 7])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_parts_of_a_tensor_are_read_alone(tmp_path, monkeypatch, begin, method):
    monkeypatch.setattr("inferjax.checkpoint.quantized_layers.PIECE_ELEMENTS", 64)
    file, known = open_pair(tmp_path, Recipe(method=method))
    wanted = known.read(f"{Q}.weight").reshape(-1)[begin:]
    pieces = [piece.copy() for piece in file.pieces(f"{Q}.weight", begin)]
    assert len(pieces) == (2 if begin < 32 * 64 else 1)
    assert_array_equal(np.concatenate(pieces), wanted)
    out = np.zeros(5, np.float16)
    for _ in file.fill(f"{Q}.weight", out, begin):
        pass
    assert_array_equal(out, wanted[:5].astype(np.float16))


def test_rows_are_read_as_codes_alone(tmp_path):
    file, known = open_pair(tmp_path, Recipe(method="awq"))
    [run] = file.codes(f"{Q}.weight", 3 * 64, 2 * 64)
    assert_array_equal(run.values(), known.read(f"{Q}.weight")[3:5])
    for begin, count in ((1, 64), (0, 65)):
        with pytest.raises(Exception, match="rows of codes"):
            next(file.codes(f"{Q}.weight", begin, count))


def test_groups_beyond_what_a_kernel_takes_are_halved(tmp_path):
    raw = LLAMA | {"intermediate_size": 1024}
    file, known = open_pair(tmp_path, Recipe(method="awq", group=512), raw)
    name = f"{DOWN}.weight"
    assert file.entries[name].codes.group == 256
    assert_array_equal(rows_of(file, name), known.read(name))


def test_layers_may_have_bits_and_groups_of_their_own(tmp_path):
    own = Recipe(symmetric=True, config={"dynamic": {"+:.*down.*": {"bits": 8}}})
    packed, plain = write_pair(tmp_path, LLAMA, own)
    other, other_plain = write_pair(
        tmp_path / "b", LLAMA, dataclasses.replace(own, bits=8, group=48)
    )
    swap_layer(packed, other, DOWN)
    swap_layer(plain, other_plain, DOWN)
    file, known = open_checkpoint(packed).file, open_checkpoint(plain).file
    for name in (f"{Q}.weight", f"{DOWN}.weight"):
        assert_array_equal(file.read(name), known.read(name))
        assert_array_equal(rows_of(file, name), known.read(name))
    assert file.entries[f"{DOWN}.weight"].dtype == "gptq int8"
