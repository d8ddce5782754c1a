"""What goes to the device in a step and what comes back: NumPy arrays with fixed shapes and dtypes.

Letters: N slots, R rows of an extend, W tokens per row, G cache groups, M pages per sequence, C the
history's length, K decode steps, n top log-probabilities, Q chosen ids. Every array is made for one
dispatch and never written again: the device may still read it.
"""

import dataclasses
from collections.abc import Sequence as List
from typing import Any, Protocol, runtime_checkable

import numpy as np

from inferjax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """New rows of the decode state, at most R.

    Slot s takes what slot `index[s]` held, then row i is written to `slots[i]` (N: nowhere). The
    newest token of a row is `tokens`, 0 where it is still to be drawn; `lengths` counts the known
    tokens in `history`, and up to `forced_lens` the next ones are prescribed there.
    """

    index: np.ndarray  # int32 [N]
    slots: np.ndarray  # int32 [R]
    tokens: np.ndarray  # int32 [R]
    keys: np.ndarray  # uint32 [R, 2]
    sample_index: np.ndarray  # int32 [R]
    history: np.ndarray  # int32 [R, C]
    lengths: np.ndarray  # int32 [R]
    prompt_lens: np.ndarray  # int32 [R]
    forced_lens: np.ndarray  # int32 [R]
    sampling: List[SamplingParams]  # up to R


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Rows of given tokens; where `slots` names a slot, its first token is drawn from the row.

    `targets`, if given, are the tokens whose log-probabilities are wanted after each token (-1:
    none), which runs the scoring program instead of the plain one.
    """

    tokens: np.ndarray  # int32 [R, W]
    lengths: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R]
    tables: tuple[np.ndarray, ...]  # G of int32 [R, M]
    slots: np.ndarray  # int32 [R_max], N for none; row i of R_max is row i of R
    targets: np.ndarray | None = None  # int32 [R, W]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Up to `steps` tokens for the active slots, all of which are below `num_rows`."""

    tables: tuple[np.ndarray, ...]  # G of int32 [num_rows, M]
    active: np.ndarray  # bool [num_rows]
    steps: int
    num_rows: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Tokens drawn by a dispatch: row i drew `counts[i]` of them, and is `done` or not."""

    tokens: np.ndarray  # int32 [B, K]
    logprobs: np.ndarray  # float32 [B, K]
    sampled_logprobs: np.ndarray  # float32 [B, K]
    top_ids: np.ndarray  # int32 [B, K, n]
    top_logprobs: np.ndarray  # float32 [B, K, n]
    chosen_logprobs: np.ndarray  # float32 [B, K, Q]
    counts: np.ndarray  # int32 [B]
    done: np.ndarray  # bool [B]
    status: np.ndarray  # int32 [B]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """What an extend returns: status bits per row, first tokens (K = 1, rows R_max), scores."""

    status: np.ndarray  # int32 [R]
    first: Drawn | None
    logprobs: np.ndarray | None = None  # float32 [R, W]
    top_ids: np.ndarray | None = None  # int32 [R, W, n]
    top_logprobs: np.ndarray | None = None  # float32 [R, W, n]


@runtime_checkable
class Handle[T](Protocol):
    """Work under way on the device."""

    def read(self) -> T:
        """Wait for the results and return them."""
        ...


@runtime_checkable
class Programs(Protocol):
    """The device side of the engine: the cache, the decode state, and the programs over them."""

    params: Any

    def warmup(self, *, progress: bool = False) -> None:
        """Compile everything."""
        ...

    def copy(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages within a cache group."""
        ...

    def shift(self, sources: tuple[np.ndarray, ...], targets: tuple[np.ndarray, ...]) -> None:
        """Write pages, int32 [M] per cache group, to others or back, their keys turned."""
        ...

    def place(self, rows: Rows) -> None:
        """Move slots and write new rows."""
        ...

    def extend(self, batch: Extend) -> Handle[Extended]:
        """Append given tokens, draw first tokens."""
        ...

    def decode(self, batch: Decode) -> Handle[Drawn]:
        """Draw further tokens."""
        ...

    def reset(self) -> None:
        """Forget everything in the cache and in the decode state."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return compilation counts and times, for statistics."""
        ...

    def close(self) -> None:
        """Give up what it holds beyond memory."""
        ...
