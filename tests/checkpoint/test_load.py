"""Loading: what a good checkpoint becomes, and the error that each kind of bad one gets."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from inferjax.checkpoint import opened
from inferjax.checkpoint.load import config_only, load
from inferjax.checkpoint.safetensors import open_safetensors
from inferjax.errors import CheckpointError, UnsupportedConfig, UnsupportedModel

Q = "model.layers.0.self_attn.q_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def edited(tiny, tmp_path):
    """Write a float32 copy of a tiny checkpoint with some tensors and config keys changed."""

    def edit(name, tensors=None, config=None, rename=lambda name: name):
        folder = tmp_path / "model"
        folder.mkdir()
        file = open_safetensors(tiny / name)
        values = {key: file.read(key).astype(np.float32) for key in file.entries}
        values = {rename(k): v for k, v in (values | (tensors or {})).items() if v is not None}
        save_file(values, folder / "model.safetensors")
        raw = json.loads((tiny / name / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return edit


@pytest.fixture
def folder(tiny, tmp_path):
    """Return a writable copy of a tiny checkpoint."""
    return shutil.copytree(tiny / "llama3_rope", tmp_path / "copy")


def assert_equal_trees(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_loaded_model_has_float32_weights_in_our_layout(tiny):
    model = load(tiny / "llama")
    file = open_safetensors(tiny / "llama")
    assert (model.family, model.path, model.tokenizer) == ("llama", tiny / "llama", None)
    assert {leaf.dtype for leaf in jax.tree.leaves(model.params)} == {jnp.dtype("float32")}
    assert model.config.dtype == "float32"
    wqkv = model.params.layers[0].attention.wqkv
    expected = file.read(Q)[16:32].T.astype(np.float32)
    np.testing.assert_array_equal(wqkv[:, 0, 1], expected)
    np.testing.assert_array_equal(model.params.head, file.read(HEAD).astype(np.float32))


def test_config_alone_equals_the_loaded_config_but_for_its_dtype(tiny):
    config = config_only(tiny / "llama")
    assert config.dtype == "bfloat16"
    assert config.layers == load(tiny / "llama").config.layers


@pytest.mark.parametrize("name", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtype_may_be_given_in_any_spelling(tiny, name):
    model = load(tiny / "deepseek_v3", dtype=name)
    assert model.config.dtype == "bfloat16"
    experts = model.params.layers[1].ffn
    assert experts.w_in.dtype == jnp.bfloat16
    # The bias that moves the choice of experts is kept exact.
    assert experts.score_bias.dtype == jnp.float32


def test_unknown_dtype_is_refused(tiny):
    for dtype in ("int8", "nonsense", jnp.float8_e4m3fn):
        with pytest.raises(UnsupportedConfig, match="bfloat16"):
            load(tiny / "llama", dtype=dtype)


def test_value_beyond_float16_is_refused(edited):
    big = np.full((64, 64), 1e6, np.float32)
    folder = edited("llama", {Q: big})
    load(folder)
    with pytest.raises(CheckpointError, match=r"q_proj.*has 4096 of 4096 .*float16"):
        load(folder, dtype="float16")


def test_a_single_file_beside_its_config_loads(folder):
    assert_equal_trees(load(folder / "model.safetensors").params, load(folder).params)


def test_weights_do_not_follow_later_changes_of_the_file(edited):
    folder = edited("llama")
    model = load(folder)
    before = jax.tree.map(np.array, model.params)
    file = folder / "model.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert_equal_trees(model.params, before)


def test_progress_is_shown_only_when_asked_for(tiny, capsys):
    load(tiny / "llama")
    assert capsys.readouterr().err == ""
    load(tiny / "llama", progress=True)
    assert "loading weights" in capsys.readouterr().err


def test_one_error_tells_all_wrong_tensors(edited):
    extra = {"model.layers.9.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    folder = edited("llama", {Q: None, HEAD: np.zeros((320, 63), np.float32), **extra})
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert error.value.missing == [Q]
    assert error.value.unexpected == list(extra)
    for part in ("1 missing", Q, "(320, 63)", "(320, 64)", "model.layers.9"):
        assert part in str(error.value)


def test_long_lists_of_tensors_are_cut(edited):
    extra = {f"extra.{i}": np.zeros(1, np.float32) for i in range(50)}
    with pytest.raises(CheckpointError, match=r"50 unexpected.*and 42 more") as error:
        load(edited("llama", extra))
    assert len(str(error.value)) < 1000


def test_an_untied_model_needs_its_head(edited):
    with pytest.raises(CheckpointError, match=r"1 missing: 'lm_head.weight'"):
        load(edited("llama", {HEAD: None}))


def test_a_tied_model_accepts_only_a_copy_of_its_embedding(tiny, edited, tmp_path):
    embed = open_safetensors(tiny / "llama3_rope").read(EMBED).astype(np.float32)
    folder = edited("llama3_rope", {HEAD: embed})
    assert load(folder).params.head is None
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(edited("llama3_rope", {HEAD: embed + 1}))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_non_finite_weights_are_refused_with_their_count(tiny, tmp_path, bad, dtype):
    file = open_safetensors(tiny / "llama3_rope")
    values = {name: file.read(name).astype(np.float32) for name in file.entries}
    values[Q][[3, 5], [1, 2]] = bad
    header, data = {}, b""
    for name, array in values.items():
        raw = array.astype(dtype).tobytes()
        kind = {"float32": "F32", "float16": "F16"}.get(np.dtype(dtype).name, "BF16")
        header[name] = {
            "dtype": kind,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    shutil.copy(tiny / "llama3_rope" / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"{Q}.*has 2 of 4096"):
        load(tmp_path)


def test_old_buffers_and_missing_prefix_are_understood(tiny, edited):
    buffers = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 128, 128), np.float32),
        "transformer.h.2.attn.masked_bias": np.float32([-1e4]),
    }
    folder = edited("gpt2", buffers, rename=lambda name: name.removeprefix("transformer."))
    assert_equal_trees(load(folder).params, load(tiny / "gpt2").params)


def test_computed_frequencies_are_skipped(edited):
    load(edited("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}))


def test_layers_that_predict_further_tokens_are_skipped(edited):
    further = {"model.layers.3.eh_proj.weight": np.ones((2, 2), np.float32)}
    folder = edited("deepseek_v3", further)
    load(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="eh_proj"):
        load(edited("deepseek_v3", {"model.layers.2.eh_proj.weight": np.ones(2, np.float32)}))


def test_a_folder_of_pickles_is_refused(tmp_path, tiny):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    shutil.copy(tiny / "llama" / "config.json", tmp_path)
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="pickle"):
            load(source)


def test_unknown_source_lists_what_was_tried(tmp_path):
    for source in (
        tmp_path / "nowhere",
        "x" * 5000,
        "a\0b",
        "~nobody-9/a",
    ):
        with pytest.raises(CheckpointError) as error:
            load(source)
        assert len(str(error.value)) < 1000
    with pytest.raises(CheckpointError, match=r"smollm2-135m-instruct.*\n.*owner/name"):
        load("llama-3")


def test_a_catalog_name_is_fetched_into_the_given_folder(tiny, tmp_path, monkeypatch):
    calls = []

    def fetch(name, cache_dir, *, progress):
        calls.append((name, cache_dir, progress))
        return tiny / "llama"

    monkeypatch.setattr(opened, "fetch", fetch)
    model = load("smollm2-135m-instruct", cache_dir=tmp_path)
    assert calls == [("smollm2-135m-instruct", tmp_path, False)]
    assert model.path == tiny / "llama"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "no config.json"),
        ("", "cannot be read"),
        ("[1, 2]", "no JSON object"),
        ("{" * 200_000, "cannot be read|too deep"),
        ('{"a":' + "[" * 200_000, "cannot be read|too deep"),
        ('{"vocab_size": 1, "a": 2, "vocab_size": 3}', "'vocab_size' twice"),
        ('{"rms_norm_eps": NaN}', "NaN is no JSON number"),
        ('{"vocab_size": ' + "9" * 10_000 + "}", "cannot be read"),
        ('{"a": "' + "x" * 17 * 2**20 + '"}', "bytes"),
    ],
)
def test_bad_config_file_is_refused(folder, text, named):
    config = folder / "config.json"
    config.unlink() if text is None else config.write_text(text)
    with pytest.raises(CheckpointError, match=named):
        load(folder)
    with pytest.raises(CheckpointError, match=named):
        config_only(folder)


def test_not_utf8_config_is_refused(folder):
    (folder / "config.json").write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(folder)


def test_unknown_model_type_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "mamba2"}')
    with pytest.raises(UnsupportedModel, match="mamba2"):
        load(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 9_999},
        {"vocab_size": 2**24, "hidden_size": 2**24},
        {"intermediate_size": 2**24},
    ],
)
def test_a_config_far_beyond_its_file_is_refused_at_once(edited, config):
    with pytest.raises(CheckpointError, match="calls for"):
        load(edited("llama", config=config))


def test_served_context_reaches_the_config(tiny):
    assert load(tiny / "llama", max_context=50).config.max_context == 50
