"""Hostile files made by hand: sizes that cannot be, numbers without end, and what is no file."""

import json
import shutil
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
from irregular_files import IRREGULAR, replace_by
from make_files import (
    gguf_pair,
    gguf_string,
    gguf_tensor,
    make_entry,
    make_gguf,
    make_safetensors,
    u32,
    u64,
)

from inferjax.checkpoint.gguf import open_gguf
from inferjax.checkpoint.json_file import read_object
from inferjax.checkpoint.load import config_only, load
from inferjax.checkpoint.orbax import RECORD_NAME, _digest, _fingerprint
from inferjax.checkpoint.safetensors import INDEX_NAME, open_safetensors
from inferjax.checkpoint.save import save
from inferjax.errors import CheckpointError, InferjaxError, UnsupportedConfig, UnsupportedModel
from inferjax.models.family import read_config
from inferjax.models.gguf_config import hf_config
from inferjax.models.registry import family_for, gguf_family_for

FLOOR_BYTES = 64 * 2**20
HUGE = [2**31, 2**32, 10**9, 2**62, 2**63, 2**64 - 1]


@contextmanager
def memory_of(file):
    """Refuse more than twice the file's size, and a fixed floor, of Python's and NumPy's memory."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * file.stat().st_size + FLOOR_BYTES


def string_array(count: int, text: str = "ab") -> bytes:
    return u32(8) + u64(count) + gguf_string(text) * count


GGUF_CLAIMS = {
    "array": lambda n: make_gguf([gguf_pair("a", 9, u32(0) + u64(n))]),
    "array of strings": lambda n: make_gguf([gguf_pair("a", 9, u32(8) + u64(n))]),
    "array of arrays": lambda n: make_gguf([gguf_pair("a", 9, u32(9) + u64(n))]),
    "string": lambda n: make_gguf([gguf_pair("a", 8, u64(n))]),
    "key": lambda n: make_gguf([u64(n) + b"a"]),
    "tensor's name": lambda n: make_gguf([], [u64(n) + b"w"]),
    "number of pairs": lambda n: make_gguf(num_pairs=n),
    "number of tensors": lambda n: make_gguf(num_tensors=n),
    "dimension": lambda n: make_gguf([], [gguf_tensor(dims=(n, 2))], bytes(64)),
    "offset": lambda n: make_gguf([], [gguf_tensor(offset=n - n % 32)], bytes(64)),
    "product of dimensions": lambda n: make_gguf([], [gguf_tensor(dims=(n, n, n))], bytes(64)),
    "alignment": lambda n: make_gguf([gguf_pair("general.alignment", 10, u64(n))]),
}


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize("make", GGUF_CLAIMS.values(), ids=GGUF_CLAIMS.keys())
def test_gguf_claim_of_more_than_the_file_is_refused(tmp_path, make, number):
    file = tmp_path / "m.gguf"
    file.write_bytes(make(number))
    with memory_of(file), pytest.raises(CheckpointError):
        open_gguf(file)


DENSE_GGUF = {
    "short strings": lambda: make_gguf([gguf_pair("a", 9, string_array(1_500_000))]),
    "pairs": lambda: make_gguf([gguf_pair(f"{i:x}", 0, b"\1") for i in range(70_000)]),
    "tensors": lambda: make_gguf([], [gguf_tensor(f"{i:x}", (1,), 0, 0) for i in range(70_000)]),
    "nested arrays": lambda: make_gguf(
        [gguf_pair("a", 9, u32(9) + u64(70_000) + (u32(0) + u64(0)) * 70_000)]
    ),
}


@pytest.mark.parametrize("make", DENSE_GGUF.values(), ids=DENSE_GGUF.keys())
def test_gguf_of_countless_small_things_is_refused(tmp_path, make):
    file = tmp_path / "m.gguf"
    file.write_bytes(make())
    with memory_of(file), pytest.raises(CheckpointError, match="at most"):
        open_gguf(file)


def test_a_million_merges_are_read(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(make_gguf([gguf_pair("merges", 9, string_array(1_000_000))]))
    assert len(open_gguf(file).metadata["merges"]) == 1_000_000


@pytest.mark.parametrize("value", [0, 3, 2**21])
def test_gguf_alignment_is_a_small_power_of_two(tmp_path, value):
    file = tmp_path / "m.gguf"
    file.write_bytes(make_gguf([gguf_pair("general.alignment", 4, u32(value))]))
    with pytest.raises(CheckpointError, match="alignment"):
        open_gguf(file)


@pytest.mark.parametrize(
    "content",
    [
        make_gguf([gguf_pair(b"\xff\xfe", 4, u32(1))]),
        make_gguf([gguf_pair("a", 8, gguf_string(b"\xc3"))]),
        make_gguf([], [gguf_tensor(b"\xed\xa0\x80")], bytes(64)),
    ],
)
def test_gguf_names_are_unicode(tmp_path, content):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="UTF-8"):
        open_gguf(file)


JUNK = {
    "array": np.arange(3),
    "empty array": np.zeros(0, np.int32),
    "long array": np.zeros(70_000, np.uint8),
    "arrays": [np.arange(2), np.arange(3)],
    "texts": ["a", "b"],
    "text": "a",
    "nan": float("nan"),
    "infinity": float("inf"),
    "negative": -1,
}
KEYS = (
    "general.architecture",
    "general.file_type",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.tokens",
    "gemma3.block_count",
    "gemma3.attention.head_count",
    "gemma3.attention.sliding_window",
    "gemma3.attention.sliding_window_pattern",
    "gemma3.rope.scaling.type",
    "gemma3.rope.scaling.factor",
    "gemma3.expert_count",
    "gemma3.attention.value_length",
    "gemma3.attention.causal",
)


@pytest.mark.parametrize("key", KEYS)
def test_junk_in_gguf_metadata_is_our_error_or_harmless(root, key):
    file = open_gguf(root / "checkpoints" / "tiny_gguf" / "gemma3_text.gguf")
    for value in JUNK.values():
        metadata = {**file.metadata, key: value}
        try:
            family, gguf = gguf_family_for(metadata)
            raw = hf_config(gguf, family.model_types[0], metadata, file.entries, file.read)
            read_config(family, raw)
        except (UnsupportedConfig, UnsupportedModel):
            continue
    file.close()


@pytest.mark.parametrize("key", ["sliding_window", "expert_count"])
def test_array_where_a_number_tells_the_family_is_our_error(key):
    prefix = {"sliding_window": "attention.", "expert_count": ""}[key]
    metadata = {"general.architecture": "llama", f"llama.{prefix}{key}": np.arange(3)}
    family, gguf = gguf_family_for(metadata)
    with pytest.raises(UnsupportedConfig):
        hf_config(gguf, family.model_types[0], metadata, [], lambda name: np.zeros(1))


# --- JSON ---

STRANGE = [
    "9" * 60,
    "-" + "9" * 60,
    "1e400",
    "5e-324",
    "true",
    "[]",
    "{}",
    '"\\ud800"',
    "[" * 900 + "]" * 900,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 900 + "1" + "}" * 900,
]
CONFIG_KEYS = ("vocab_size", "rope_theta", "rope_scaling", "hidden_act", "architectures", "dtype")


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_strange_value_in_a_config_is_our_error_or_harmless(tmp_path, tiny, text):
    raw = json.loads((tiny / "llama" / "config.json").read_text())
    for key in (*CONFIG_KEYS, "model_type", "eos_token_id", "num_attention_heads", "novel"):
        marked = json.dumps({**raw, key: "@"}).replace('"@"', text)
        (tmp_path / "config.json").write_text(marked)
        try:
            family = family_for(read_object(tmp_path / "config.json").get("model_type"))
            read_config(family, read_object(tmp_path / "config.json"))
        except InferjaxError as error:
            assert len(str(error)) < 5000  # noqa: PT017


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
@pytest.mark.parametrize("unit", ["[],", "{},", '"ab",', "[[[]]],"])
def test_dense_json_costs_little_more_than_its_text(tmp_path, name, unit):
    file = tmp_path / name
    file.write_text('{"a":[' + unit * (2**22 // len(unit)) + "0]}")
    open_it = open_safetensors if name == INDEX_NAME else read_object
    with memory_of(file), pytest.raises(CheckpointError):
        open_it(file)


def test_a_million_keys_are_refused_before_they_are_parsed(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({f"k{i}": 0 for i in range(1_000_000)}))
    with memory_of(file), pytest.raises(CheckpointError, match="at most"):
        read_object(file)


def test_header_of_a_hundred_megabytes_is_refused_before_it_is_parsed(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(make_safetensors(b"{" + b" " * 100 * 2**20 + b"}"))
    with memory_of(file), pytest.raises(CheckpointError, match="header of"):
        open_safetensors(file)


def test_header_that_is_most_of_its_file_is_refused(tmp_path):
    entries = {f"w{i}": make_entry("F32", (0,), (0, 0)) for i in range(80_000)}
    file = tmp_path / "model.safetensors"
    file.write_bytes(make_safetensors(entries))
    with memory_of(file), pytest.raises(CheckpointError, match="header of"):
        open_safetensors(file)


ENTRIES = {
    "overlapping": {"a": make_entry(offsets=(0, 8)), "b": make_entry(offsets=(4, 12))},
    "reversed": {"a": make_entry(offsets=(8, 0))},
    "beyond the end": {"a": make_entry(offsets=(8, 2**62))},
    "too short": {"a": make_entry("F64", (2,), (0, 8))},
    "overflowing": {"a": make_entry("F32", (2**62, 2**62, 0), (0, 0))},
    "negative": {"a": make_entry("F32", (-2,), (0, 8))},
    "many dimensions": {"a": make_entry("F32", [1] * 40 + [2], (0, 8))},
    "a name without end": {"a" * 10**6: make_entry(offsets=(0, 4))},
}


@pytest.mark.parametrize("entries", ENTRIES.values(), ids=ENTRIES.keys())
def test_entry_that_lies_is_refused(tmp_path, entries):
    file = tmp_path / "model.safetensors"
    file.write_bytes(make_safetensors(entries, bytes(12)))
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(file)
    assert len(str(caught.value)) < 2000


# --- what is no file ---


def tiny_copy(tiny, folder):
    shutil.copytree(tiny / "llama_embedding", folder / "model")
    return folder / "model"


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "1_Pooling/config.json"])
def test_what_is_no_file_is_not_waited_for(tmp_path, tiny, name, kind):
    folder = tiny_copy(tiny, tmp_path)
    replace_by(kind, folder / name)
    with pytest.raises(InferjaxError):
        load(folder)


@pytest.mark.parametrize("target", ["safetensors", "orbax", "config"])
def test_folder_that_may_not_be_looked_into_is_our_error(tmp_path, tiny, target, monkeypatch):
    folder = tiny_copy(tiny, tmp_path)
    if target == "orbax":
        folder = save(load(folder), tmp_path / "saved")

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    monkeypatch.setattr("pathlib.Path.glob", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        (config_only if target == "config" else load)(folder)


# --- Orbax, with a record that agrees with the damage ---


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    return save(load(tiny / "llama_embedding"), tmp_path_factory.mktemp("orbax") / "saved")


def forge(folder, **changes) -> None:
    """Write a record that agrees with the folder, but for the changes."""
    record = json.loads((folder / RECORD_NAME).read_text())
    files = [f for f in folder.rglob("*") if f.is_file() and f.name != RECORD_NAME]
    record["files"] = {f.relative_to(folder).as_posix(): _fingerprint(f) for f in files}
    record = {**record, **changes}
    del record["sha256"]
    (folder / RECORD_NAME).write_text(json.dumps({"sha256": _digest(record), **record}))


@pytest.mark.parametrize("kind", ["pipe", "link to itself", "device"])
@pytest.mark.parametrize("name", ["params/_METADATA", "params/manifest.ocdbt"])
def test_native_code_never_sees_what_is_no_file(tmp_path, saved, name, kind):
    folder = shutil.copytree(saved, tmp_path / "saved")
    replace_by(kind, folder / name)
    if kind == "device":
        (folder / name).unlink()
        forge(folder)
        (folder / name).symlink_to("/dev/zero")
    else:
        forge(folder)
    with pytest.raises(CheckpointError, match="damaged"):
        load(folder)


def test_folder_that_is_a_link_is_refused(tmp_path, saved):
    """What it leads to is not in the record, and need not stay what it is."""
    folder = shutil.copytree(saved, tmp_path / "saved")
    shutil.move(folder / "params" / "d", tmp_path / "outside")
    (folder / "params" / "d").symlink_to(tmp_path / "outside")
    forge(folder)
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        load(folder)


def test_links_to_files_are_followed(tmp_path, saved):
    """So are models laid out by the hub's cache."""
    folder = shutil.copytree(saved, tmp_path / "saved")
    shutil.move(folder / "params" / "_METADATA", tmp_path / "blob")
    (folder / "params" / "_METADATA").symlink_to(tmp_path / "blob")
    load(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {"params/_METADATA": 3}},
        {"files": {"params/_METADATA": {"num_bytes": "3", "sha256": None}}},
        {"dtype": "object"},
        {"dtype": ["float32"]},
        {"head": "labels"},
        {"head": "vocabulary "},
        {"max_context": -1},
        {"max_context": 2**40},
        {"max_context": "8"},
        {"max_context": 1.5},
        {"pooling": {"kind": "max"}},
        {"pooling": {"kind": []}},
        {"pooling": 1},
        {"family": "gpt2"},
        {"family": 3},
        {"config": []},
    ],
)
def test_record_of_wrong_types_is_our_error(tmp_path, saved, changes):
    folder = shutil.copytree(saved, tmp_path / "saved")
    forge(folder, **changes)
    with pytest.raises(InferjaxError):
        load(folder)
