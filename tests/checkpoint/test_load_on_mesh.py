"""Loading onto a mesh: each device gets its part of a weight, and never more."""

from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from meshes import mesh_of
from rewrite_gguf import Kind, rewrite
from tiny_models import TINY, tiny_model

import inferjax as ij
from inferjax.checkpoint import memory, reading
from inferjax.errors import ShardingError
from inferjax.models.placed import _check_kinds, place

GGUF = TINY.parent / "tiny_gguf"
QUANTIZED = TINY.parent / "tiny_quantized"


def of_blocks(folder: Path) -> Path:
    """Write a model of GGUF blocks."""
    parts = ("attn_q", "attn_k", "attn_v", "ffn_up", "ffn_gate", "token_embd")
    return rewrite(
        GGUF / "llama.gguf",
        folder / "m.gguf",
        lambda name, _: Kind.Q8_0 if any(part in name for part in parts) else None,
    )


SOURCES: dict[str, Any] = {
    "safetensors": (lambda _: TINY / "llama", None),
    "experts": (lambda _: TINY / "mixtral", None),
    "latents": (lambda _: TINY / "deepseek_v3", None),
    "gguf, decoded": (lambda _: GGUF / "llama.gguf", None),
    "gguf, native codes": (of_blocks, None),
    "gptq": (lambda _: QUANTIZED / "gptq", None),
    "gptq, act-order": (lambda _: QUANTIZED / "gptq_act_order", None),
    "awq": (lambda _: QUANTIZED / "awq", None),
    "packed while it is read": (lambda _: TINY / "qwen3_moe", "int8"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_weights_are_those_that_are_placed_afterwards(name, tmp_path):
    find, scheme = SOURCES[name]
    path, mesh = find(tmp_path), mesh_of(4, 2)
    got = ij.load(path, quantize=scheme, mesh=mesh)
    alone = ij.load(path, quantize=scheme)
    want = place(alone.params, alone.config, mesh)
    assert got.config == alone.config
    assert jax.tree.structure(got.params) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got.params), jax.tree.leaves(want), strict=True):
        assert ours.sharding == theirs.sharding
        np.testing.assert_array_equal(ours, theirs)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(got.params))


def device_bytes(arrays: list[jax.Array]) -> Counter[int]:
    """Count the bytes that arrays have on each device."""
    shards = [shard for array in arrays for shard in array.addressable_shards]
    # A shard is also an array of its own.
    buffers = {
        (shard.device.id, shard.data.unsafe_buffer_pointer()): shard.data.nbytes for shard in shards
    }
    found: Counter[int] = Counter()
    for (device, _), num_bytes in buffers.items():
        found[device] += num_bytes
    return found


# Packed, some parts of so small a model would not end with whole blocks.
@pytest.mark.parametrize(("scheme", "share"), [(None, 0.55), ("int8", 0.7)])
def test_no_device_ever_has_more_than_its_part(scheme, share, monkeypatch):
    """What is handed to a device is counted, and what is alive after each weight."""
    jax.block_until_ready(tiny_model("llama").params)  # whatever else lives, lives already
    before = {id(array) for array in jax.live_arrays()}
    largest: Counter[int] = Counter()

    def watched(leaf: Any, *rest: Any) -> Any:
        array = read_leaf(leaf, *rest)
        new = [array for array in jax.live_arrays() if id(array) not in before]
        for device, count in device_bytes(new).items():
            largest[device] = max(largest[device], count)
        return array

    read_leaf = reading.read_leaf
    monkeypatch.setattr(reading, "read_leaf", watched)
    monkeypatch.setattr(reading.jax, "device_put", refuse)
    model = ij.load(TINY / "llama", quantize=scheme, mesh=mesh_of(1, 2))
    held = device_bytes(jax.tree.leaves(model.params))
    assert len(held) == 2
    assert set(held.values()) == {max(held.values())}
    assert all(largest[device] <= held[device] for device in held)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert max(held.values()) < share * whole


def refuse(*_: Any, **__: Any) -> Any:
    pytest.fail("a whole weight was put on a device")


def test_the_host_builds_one_large_weight_at_a_time(monkeypatch):
    """Its room is that of the largest, whatever the number of threads."""
    monkeypatch.setattr(reading, "_MIN_ROOM_BYTES", 0)
    monkeypatch.setattr(reading.os, "cpu_count", lambda: 8)
    rooms: list[Any] = []

    class Watched(memory.Room):
        def __init__(self, limit: int) -> None:
            super().__init__(limit)
            self.limit, self.peak = limit, 0
            rooms.append(self)

        def of(self, num_bytes: int) -> Any:
            self.peak = max(self.peak, num_bytes)
            return super().of(num_bytes)

    monkeypatch.setattr(reading, "Room", Watched)
    model = ij.load(TINY / "mixtral", mesh=mesh_of(1, 2))
    [room] = rooms
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    # Its parts as they are read, what they are joined to, and its final form.
    assert room.peak == room.limit <= 3 * largest


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_some_of_the_devices_is_enough(kind):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(kind,), devices=jax.devices()[5:7])
    model = ij.load(TINY / "llama", mesh=mesh)
    used = {device.id for leaf in jax.tree.leaves(model.params) for device in leaf.devices()}
    assert used == {5, 6}


def test_rules_name_the_axes():
    rules = ij.Rules(rows=("replica",), axes=(("ffn", "x"), ("vocab", "y")))
    mesh = jax.make_mesh((2, 2, 2), ("replica", "x", "y"), axis_types=(AxisType.Auto,) * 3)
    params: Any = ij.load(TINY / "llama", mesh=mesh, rules=rules).params
    assert params.embed.sharding.spec[0] == "y"
    assert params.layers[0].ffn.w_down.sharding.spec[0] == "x"
    assert params.layers[0].attention.wo.is_fully_replicated


def test_what_does_not_divide_is_whole_on_every_device():
    """Gemma 3 has one key/value head; its feed-forward layers are cut all the same."""
    layer: Any = ij.load(TINY / "gemma3_text", mesh=mesh_of(1, 8)).params.layers[0]
    assert layer.attention.wqkv.is_fully_replicated
    assert not layer.ffn.w_in.is_fully_replicated


def test_an_axis_that_the_rules_do_not_name_is_refused():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ShardingError, match="'tensor' of 4 devices cuts nothing") as caught:
        ij.load(TINY / "llama", mesh=mesh)
    assert "'model'" in caught.value.why
    assert caught.value.axis == "tensor"


def test_an_axis_that_divides_nothing_is_refused():
    mesh = jax.make_mesh((3,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    with pytest.raises(ShardingError, match="'model' of 3 devices divides no weight of llama"):
        ij.load(TINY / "llama", mesh=mesh)


NO_MESHES = {
    "manual": Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(AxisType.Manual,)),
    "empty": Mesh(np.array([], dtype=object).reshape(0), ("model",)),
}


@pytest.mark.parametrize("name", NO_MESHES)
def test_what_is_no_mesh_of_devices_is_refused(name, tmp_path):
    saved = ij.save(tiny_model("llama"), tmp_path / "saved")
    for source in (TINY / "llama", saved):
        with pytest.raises(ShardingError, match="mesh="):
            ij.load(source, mesh=NO_MESHES[name])


@pytest.mark.parametrize("mesh", [{"model": 2}, "model", AbstractMesh((2,), ("model",))])
def test_what_is_another_type_is_refused(mesh):
    with pytest.raises(ShardingError, match="mesh="):
        _check_kinds(mesh, ij.Rules())
    with pytest.raises(ShardingError, match="rules=None"):
        _check_kinds(mesh_of(4, 2), None)
