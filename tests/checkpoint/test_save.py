"""Saved models come back as they were, whole or not at all."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import ONE_EACH, TINY, tiny_model
from tokenizer_vocabularies import byte_level_metadata

import inferjax as ij
from inferjax.checkpoint import replace as replace_module
from inferjax.checkpoint.replace import previous_of, replacing
from inferjax.errors import CheckpointError, ShapeError, UnsupportedConfig
from inferjax.tokenizer import tokenizer_from_gguf


def assert_equal_models(ours: ij.Model, other: ij.Model) -> None:
    assert ours.config == other.config
    jax.tree.map(np.testing.assert_array_equal, ours.params, other.params)


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
@pytest.mark.parametrize("folder", ONE_EACH)
def test_a_saved_model_comes_back(folder, format, tmp_path):
    model = tiny_model(folder)
    path = ij.save(model, tmp_path / "saved", format=format, shard_bytes=200_000)
    again = ij.load(path, dtype=model.config.dtype)
    assert_equal_models(model, again)
    assert again.tokenizer is None


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_half_precision_is_kept_and_widened(format, tmp_path):
    model = ij.load(TINY / "llama", dtype="bfloat16")
    path = ij.save(model, tmp_path / "saved", format=format)
    assert_equal_models(model, ij.load(path, dtype="bfloat16"))
    wide = ij.load(path, dtype="float32")
    assert wide.params.embed.dtype == jnp.float32
    np.testing.assert_array_equal(wide.params.embed, model.params.embed.astype(jnp.float32))
    assert ij.load(path).config.dtype == "float32"  # this machine's default


@pytest.mark.parametrize("format", ["orbax", "safetensors"])
def test_the_tokenizer_travels_with_the_weights(format, tmp_path):
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    model = dataclasses.replace(tiny_model("llama"), tokenizer=tokenizer)
    again = ij.load(ij.save(model, tmp_path / "saved", format=format)).tokenizer
    assert again is not None
    assert again.special == tokenizer.special
    assert again.templates == tokenizer.templates
    for text in ("", "Hello, world!", "naïve ünicode 🙂  two  spaces\n\n", "<s> in text"):
        assert again.encode(text) == tokenizer.encode(text), text
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text)), text


def test_trained_weights_replace_the_loaded_ones(tmp_path):
    model = tiny_model("llama")
    trained = jax.tree.map(lambda leaf: leaf * 1.5, model.params)
    path = ij.save(dataclasses.replace(model, params=trained), tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, ij.load(path).params, trained)


def test_weights_of_another_model_are_refused(tmp_path):
    model = dataclasses.replace(tiny_model("llama"), params=tiny_model("gpt2").params)
    with pytest.raises(ShapeError):
        ij.save(model, tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(UnsupportedConfig, match="orbax, safetensors"):
        ij.save(tiny_model("llama"), tmp_path / "saved", format="pickle")


def test_nothing_is_overwritten_by_accident(tmp_path):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        ij.save(tiny_model("gpt2"), path)
    assert ij.load(path).family == "llama"
    ij.save(tiny_model("gpt2"), path, overwrite=True)
    assert ij.load(path).family == "gpt2"
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


class Interrupted(Exception):
    pass


def test_an_error_while_writing_leaves_the_previous_one(tmp_path):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")

    def fail():
        with replacing(path, overwrite=True) as folder:
            (folder / "half").write_text("a half")
            raise Interrupted

    with pytest.raises(Interrupted):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
    assert_equal_models(ij.load(path), tiny_model("llama"))


@pytest.mark.parametrize("renames", [1, 2])
def test_an_interrupt_at_every_rename_leaves_one_whole_checkpoint(tmp_path, monkeypatch, renames):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    calls = []

    def rename(self, target):
        calls.append(self)
        if len(calls) == renames:
            raise Interrupted
        os.rename(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Interrupted):
        ij.save(tiny_model("gpt2"), path, overwrite=True)
    monkeypatch.undo()
    assert_equal_models(ij.load(path), tiny_model("llama"))


def _save_forever(path: Path) -> None:
    model = tiny_model("llama")
    while True:
        ij.save(model, path, overwrite=True)


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    for delay in (0.0, 0.013, 0.029, 0.05):
        process = multiprocessing.get_context("spawn").Process(target=_save_forever, args=(path,))
        process.start()
        while not list(tmp_path.glob(".saved.saving-*")):
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert_equal_models(ij.load(path), tiny_model("llama"))
    ij.save(tiny_model("llama"), path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]


def test_another_process_that_is_alive_keeps_its_folder(tmp_path):
    path = tmp_path / "saved"
    other = tmp_path / f".saved.saving-{os.getppid()}"
    other.mkdir()
    with replacing(path, overwrite=False) as folder:
        (folder / "file").write_text("x")
    assert other.exists()
    assert not previous_of(path).exists()
    assert replace_module._is_alive(os.getppid())


def saved_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_every_file_of_a_saved_model_is_checked(tmp_path):
    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    for file in saved_files(path):
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole + b"x", _flipped(whole)):
            if damaged == whole:
                continue
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError):
                ij.load(path)
        file.unlink()
        with pytest.raises(CheckpointError):
            ij.load(path)
        file.write_bytes(whole)
    (path / "params" / "extra").write_text("x")
    with pytest.raises(CheckpointError, match="files that are new"):
        ij.load(path)


def _flipped(whole: bytes) -> bytes:
    middle = len(whole) // 2
    return whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :] if whole else b""


def test_a_record_of_another_model_is_refused(tmp_path):
    first = ij.save(tiny_model("llama"), tmp_path / "first")
    second = ij.save(tiny_model("gpt2"), tmp_path / "second")
    record = json.loads((first / "inferjax.json").read_text())
    other = json.loads((second / "inferjax.json").read_text())
    record["config"], record["family"] = other["config"], other["family"]
    (first / "inferjax.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="not as it was saved"):
        ij.load(first)


def test_weights_that_do_not_fit_their_record_are_refused(tmp_path):
    """A record that is consistent in itself still has to fit the weights."""
    from inferjax.checkpoint.orbax import _digest

    path = ij.save(tiny_model("llama"), tmp_path / "saved")
    record = json.loads((path / "inferjax.json").read_text())
    record["config"]["intermediate_size"] *= 1000
    del record["sha256"]
    (path / "inferjax.json").write_text(json.dumps({"sha256": _digest(record), **record}))
    with pytest.raises(CheckpointError, match="does not hold the weights of its config"):
        ij.load(path)
