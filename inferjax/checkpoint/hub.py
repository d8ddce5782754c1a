"""Fetches models of the Hugging Face Hub into the hub's own cache, where other programs find them.

Only the files that a model needs are fetched, and pickles never.
"""

import dataclasses
import glob
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tqdm

from inferjax.checkpoint.hub_files import HubId, is_small, needed_files
from inferjax.checkpoint.json_file import read_object
from inferjax.checkpoint.safetensors import INDEX_NAME, MAX_JSON_BYTES, SINGLE_NAME
from inferjax.errors import CheckpointError, HubUnreachable


@dataclasses.dataclass(frozen=True, slots=True)
class Hub:
    """Where models come from: None stands for Hugging Face's own endpoint, cache and token."""

    endpoint: str | None = None
    cache_dir: Path | None = None
    token: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """What a repository holds at one commit, with sizes in bytes where they are known."""

    commit: str
    files: dict[str, int | None]


def fetch_from_hub(hub_id: HubId, *, hub: Hub | None = None, progress: bool = True) -> Path:
    """Return the path of a model, fetching the files it needs that the hub's cache lacks.

    An interrupted fetch goes on where it stopped. Without the hub, a model that the cache holds
    whole is returned.

    Raises: CheckpointError for a repository or revision that is not there or not open to this
      account, for one without files that can be read, and for a hub that cannot be reached.
    """
    hub = hub or Hub()
    try:
        listing = list_files(hub_id, hub)
    except HubUnreachable as error:
        return _cached(hub_id, hub, error.why)
    files = needed_files(hub_id, listing.files)
    try:
        folder = _download(hub_id, hub, files, progress)
        _check_shards(folder, files, hub_id)
    except HubUnreachable as error:
        return _cached(hub_id, hub, error.why)
    return _model_path(folder, files)


def fetch_small_files(hub_id: HubId, *, hub: Hub | None = None) -> tuple[Path, Listing]:
    """Return a folder with what describes a model without its weights, and what the hub lists.

    Raises: CheckpointError as `fetch_from_hub`.
    """
    hub = hub or Hub()
    listing = list_files(hub_id, hub)
    small = [name for name in listing.files if is_small(name)]
    return _download(hub_id, hub, small, progress=False), listing


def list_files(hub_id: HubId, hub: Hub) -> Listing:
    """Ask the hub what a repository holds.

    Raises: CheckpointError for a refusal, HubUnreachable if there is no answer.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    found: Any = _asking(
        hub_id, lambda: api.model_info(hub_id.repo, revision=hub_id.revision, files_metadata=True)
    )
    return Listing(found.sha, {file.rfilename: file.size for file in found.siblings})


def _check_shards(folder: Path, files: Sequence[str], hub_id: HubId) -> None:
    """Raise if the index names shards that the repository does not hold."""
    if INDEX_NAME not in files or SINGLE_NAME in files:
        return
    shards = read_object(folder / INDEX_NAME, MAX_JSON_BYTES).get("weight_map")
    missing = (
        sorted(set(map(str, shards.values())) - set(files)) if isinstance(shards, dict) else []
    )
    if missing:
        raise CheckpointError(
            f"{hub_id.repo} lacks {len(missing)} of the files that its index names",
            why=", ".join(missing[:8])[:200],
            fix="the repository is incomplete: tell its owner, or use another revision",
        )


def _model_path(folder: Path, files: Sequence[str]) -> Path:
    return folder / files[0] if files[0].endswith(".gguf") else folder


def _download(hub_id: HubId, hub: Hub, files: Sequence[str], progress: bool) -> Path:
    """Fetch files by the revision's own name, which is how the cache finds them without the hub."""
    from huggingface_hub import snapshot_download

    settings: dict[str, Any] = {
        "revision": hub_id.revision,
        "allow_patterns": list(map(glob.escape, files)),
        "endpoint": hub.endpoint,
        "cache_dir": hub.cache_dir,
        "token": hub.token,
        "tqdm_class": _bar(shown=progress),
    }
    return Path(_asking(hub_id, lambda: snapshot_download(hub_id.repo, **settings)))


def _bar(*, shown: bool) -> Any:
    """Return the kind of progress bar that the hub's library makes for all files."""

    class Bar(tqdm.tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            settings.pop("name", None)
            super().__init__(*args, **settings | {"disable": not shown})

    return Bar


def _cached(hub_id: HubId, hub: Hub, why: str) -> Path:
    """Return the model that an earlier fetch left in the cache, if it is whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                hub_id.repo,
                revision=hub_id.revision,
                cache_dir=hub.cache_dir,
                local_files_only=True,
                allow_patterns=[],  # newer versions miss the files that are not needed
            )
        )
    except (LocalEntryNotFoundError, ValueError, OSError) as error:
        raise _unreachable(hub_id, why) from error
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        files = needed_files(hub_id, names)
        _check_shards(folder, files, hub_id)
    except CheckpointError as error:
        why = f"{why}; the cache holds a part of the model in {folder}"
        raise _unreachable(hub_id, why) from error
    return _model_path(folder, files)


def _asking[T](hub_id: HubId, ask: Callable[[], T]) -> T:
    """Return the hub's answer, or raise what its refusal means.

    Raises: CheckpointError for a refusal, HubUnreachable if there is no answer.
    """
    from huggingface_hub import errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        _refuse(hub_id, "is open to those only who accepted its terms", error)
    except errors.RevisionNotFoundError as error:
        _refuse(hub_id, f"has no revision {hub_id.revision!r}", error)
    except errors.RepositoryNotFoundError as error:
        _refuse(hub_id, "is not on the hub, or not open to this account", error)
    except (errors.EntryNotFoundError, errors.HFValidationError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(hub_id, _first_line(error)) from error
        _refuse(hub_id, "cannot be fetched", error)
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        if status in (401, 403):
            _refuse(hub_id, f"is not open to this account (HTTP {status})", error)
        raise _unreachable(hub_id, _first_line(error)) from error
    # Which library sends the requests, and so what it raises, differs between versions.
    except Exception as error:
        raise _unreachable(hub_id, f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _refuse(hub_id: HubId, what: str, error: Exception) -> NoReturn:
    raise CheckpointError(
        f"{hub_id.repo} {what}",
        why=_first_line(error),
        fix="check the id; for a gated or private model accept its terms on its page and log in "
        "with `hf auth login`",
    ) from error


def _unreachable(hub_id: HubId, why: str) -> HubUnreachable:
    return HubUnreachable(
        f"{hub_id.repo} is not in the cache, and the hub cannot be reached",
        why=why,
        fix=f"where there is a network run `hf download {hub_id.repo} --local-dir FOLDER`, copy "
        "the folder here, and give its path",
    )
