"""Hub ids: which files are fetched, and what is said when they cannot be; no network is used."""

import shutil
import time

import jax
import numpy as np
import pytest
from fake_hub import COMMIT, serve

from inferjax.checkpoint import opened
from inferjax.checkpoint.hub import Hub, fetch_from_hub
from inferjax.checkpoint.hub_files import HubId, needed_files, parse_hub_id
from inferjax.checkpoint.load import load
from inferjax.checkpoint.opened import find_model
from inferjax.errors import CheckpointError

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
REPO = "someone/tiny-llama"
CLOSED = "http://127.0.0.1:9"  # nothing listens on the port named discard


@pytest.fixture
def fake():
    with serve() as server:
        yield server


@pytest.fixture
def hub(fake, tmp_path):
    return Hub(endpoint=fake.endpoint, cache_dir=tmp_path / "hub", token="hf_test")


@pytest.fixture
def repo(fake, tiny):
    """Publish the tiny llama with everything that repositories hold beside a model."""
    files = {path.name: path.read_bytes() for path in (tiny / "llama").iterdir() if path.is_file()}
    extra = {
        "README.md": b"# tiny",
        "pytorch_model.bin": b"\x80\x02pickle",
        "consolidated.safetensors": b"another naming",
        "original/config.json": b"{}",
        "original/consolidated.00.pth": b"\x80\x02pickle",
        "onnx/model.onnx": b"onnx",
    }
    fake.repos[REPO] = {k: v for k, v in files.items() if k != "expected.npz"} | extra
    return fake.repos[REPO]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a/b", HubId("a/b")),
        ("Qwen/Qwen3-0.6B", HubId("Qwen/Qwen3-0.6B")),
        ("a/b@refs/pr/3", HubId("a/b", revision="refs/pr/3")),
        ("a/b:Q4_K_M", HubId("a/b", quant="Q4_K_M")),
        ("a/b@v1:q8_0", HubId("a/b", revision="v1", quant="q8_0")),
        ("a/b/c.gguf", HubId("a/b", file="c.gguf")),
        ("a/b/UD/c-00001-of-00002.gguf@v1", HubId("a/b", "v1", "UD/c-00001-of-00002.gguf")),
        ("a", None),
        ("a/b/c", None),
        ("/a/b", None),
        ("./a/b", None),
        ("../b", None),
        ("a/..", None),
        ("a/b/../c.gguf", None),
        ("a/b@../../x", None),
        ("a//b", None),
        ("a/b:", None),
        ("a/b/c.gguf:Q4_0", None),
        ("~/a", None),
        ("a b/c", None),
        ("a/b\n", None),
        ("é/b", None),
    ],
)
def test_a_hub_id_is_told_from_a_path(source, expected):
    assert parse_hub_id(source) == expected


def test_only_what_a_model_needs_is_fetched(fake, hub, repo, tiny):
    path = find_model(REPO, None, progress=False, hub=hub)
    names = {file.name for file in path.iterdir()}
    assert names == {"config.json", INDEX, *SHARDS}
    jax.tree.map(np.testing.assert_array_equal, load(path).params, load(tiny / "llama").params)
    before = len(fake.fetched)
    assert find_model(REPO, None, progress=False, hub=hub) == path
    assert len(fake.fetched) == before


def test_load_takes_a_hub_id(hub, repo, monkeypatch):
    monkeypatch.setattr(
        opened, "fetch_from_hub", lambda hub_id, **_: fetch_from_hub(hub_id, hub=hub)
    )
    assert load(REPO).family == "llama"
    assert load(f"{REPO}@{COMMIT}").path.name == COMMIT


def test_an_existing_path_comes_before_a_hub_id(tiny, tmp_path, monkeypatch):
    shutil.copytree(tiny / "llama", tmp_path / "someone" / "tiny-llama")
    monkeypatch.chdir(tmp_path)
    assert load(REPO).family == "llama"


def test_an_interrupted_fetch_goes_on_with_what_is_missing(fake, hub, repo, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)  # between the library's retries
    fake.cut = SHARDS[1]
    with pytest.raises(CheckpointError, match="cannot be reached"):
        fetch_from_hub(HubId(REPO), hub=hub, progress=False)
    assert SHARDS[0] in fake.fetched
    fake.cut = None
    fake.fetched.clear()
    path = fetch_from_hub(HubId(REPO), hub=hub, progress=False)
    assert set(fake.fetched) == {SHARDS[1]}
    assert all((path / name).read_bytes() == repo[name] for name in SHARDS)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (404, "RepoNotFound", "not on the hub"),
        (401, "", "HTTP 401"),
        (403, "GatedRepo", "accepted its terms"),
        (401, "GatedRepo", "accepted its terms"),
        (403, "", "HTTP 403"),
    ],
)
def test_a_repository_that_is_not_open_is_an_error(fake, hub, status, code, text):
    fake.refused[REPO] = (status, code)
    with pytest.raises(CheckpointError, match=text) as error:
        fetch_from_hub(HubId(REPO), hub=hub)
    assert REPO in error.value.what
    assert "hf auth login" in error.value.fix


def test_a_missing_revision_is_named(hub, repo):
    with pytest.raises(CheckpointError, match="no revision 'v9'"):
        fetch_from_hub(HubId(REPO, revision="v9"), hub=hub)


def test_without_the_hub_a_cached_model_is_used(hub, repo, tmp_path):
    path = fetch_from_hub(HubId(REPO), hub=hub, progress=False)
    offline = Hub(endpoint=CLOSED, cache_dir=hub.cache_dir)
    assert fetch_from_hub(HubId(REPO), hub=offline) == path
    assert fetch_from_hub(HubId(REPO, revision=COMMIT), hub=offline) == path
    (path / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match="holds a part of the model"):
        fetch_from_hub(HubId(REPO), hub=offline)


def test_without_the_hub_and_a_cache_the_error_tells_the_way(tmp_path):
    offline = Hub(endpoint=CLOSED, cache_dir=tmp_path)
    with pytest.raises(CheckpointError, match="cannot be reached") as error:
        fetch_from_hub(HubId(REPO), hub=offline)
    assert f"hf download {REPO}" in error.value.fix


def test_a_gguf_is_chosen_by_its_quantization_and_split_files_come_together(fake, hub):
    fake.repos[REPO] = {
        "m-Q4_K_M.gguf": b"four",
        "m-Q4_K_S.gguf": b"small",
        "mmproj-m-Q4_K_M.gguf": b"images",
        "m-Q8_0-00001-of-00002.gguf": b"one",
        "m-Q8_0-00002-of-00002.gguf": b"two",
        "README.md": b"",
    }
    assert fetch_from_hub(HubId(REPO), hub=hub, progress=False).read_bytes() == b"four"
    path = fetch_from_hub(HubId(REPO, quant="q8_0"), hub=hub, progress=False)
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert (path.parent / "m-Q8_0-00002-of-00002.gguf").read_bytes() == b"two"
    path = fetch_from_hub(HubId(REPO, file="m-Q4_K_S.gguf"), hub=hub, progress=False)
    assert path.read_bytes() == b"small"
    with pytest.raises(CheckpointError, match=r"no GGUF models for 'Q4_K'"):
        fetch_from_hub(HubId(REPO, quant="Q4_K"), hub=hub)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["pytorch_model.bin", "config.json"], "pickles"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter"),
        (["model.safetensors"], "no config.json"),
        (["README.md"], r"it holds README\.md"),
        ([], "it holds nothing"),
        (["a-Q5_0.gguf", "a-Q8_0.gguf"], "'Q4_K_M'"),
        (["consolidated.safetensors", "config.json"], "it holds"),
    ],
)
def test_a_repository_without_a_model_says_what_it_has(names, text):
    with pytest.raises(CheckpointError, match=text):
        needed_files(HubId(REPO), names)


def test_one_naming_of_the_weights_is_chosen():
    base = ["config.json", "1_Pooling/config.json", "original/model.safetensors"]
    names = [*base, *SHARDS, INDEX, "consolidated.safetensors", "model.safetensors"]
    assert needed_files(HubId(REPO), names) == [
        "model.safetensors",
        "1_Pooling/config.json",
        "config.json",
        INDEX,
    ]
    names.remove("model.safetensors")
    assert needed_files(HubId(REPO), names)[:2] == SHARDS


def test_an_index_that_names_absent_shards_is_an_error(fake, hub, tmp_path):
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "other.safetensors"}}'
    fake.repos[REPO] = {"config.json": b"{}", INDEX: index, SHARDS[0]: b"x"}
    with pytest.raises(CheckpointError, match=r"lacks 1 .*\n.*other\.safetensors"):
        fetch_from_hub(HubId(REPO), hub=hub, progress=False)


def test_progress_is_shown_when_asked_for(hub, repo, capsys):
    fetch_from_hub(HubId(REPO), hub=hub, progress=True)
    assert capsys.readouterr().err
