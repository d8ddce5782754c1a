"""Looks for the mesh, and for the batch, that are best for a load."""

import bisect
import dataclasses
from collections.abc import Sequence

from inferjax.errors import InvalidInput
from inferjax.planner.fit import check_fits, fitting, room_on, smallest_that_fits
from inferjax.planner.hardware import Chip
from inferjax.planner.load import Load, check
from inferjax.planner.mesh import Mesh
from inferjax.planner.model import Model
from inferjax.planner.steps import StepTime, step_time
from inferjax.planner.work import decode_work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch on one mesh: the least time per token, and the rates that follow.

    `tok_s` counts the tokens of all users, `user_tok_s` those of one.
    """

    mesh: Mesh
    batch: int
    step: StepTime
    tok_s: float
    user_tok_s: float


def decode_point(model: Model, chip: Chip, mesh: Mesh, load: Load, batch: int) -> Point:
    """Return the floor of a step of `batch` sequences; whether they fit is not asked."""
    work = decode_work(model, mesh, batch=batch, context=load.context)
    step = step_time(chip, model, work, rows=-(-batch // mesh.num_groups))
    return Point(
        mesh=mesh,
        batch=batch,
        step=step,
        tok_s=batch / step.seconds,
        user_tok_s=1 / step.seconds,
    )


def fastest(model: Model, chip: Chip, candidates: Sequence[Mesh], load: Load) -> Point:
    """Return the mesh with the least time per token at `load.batch`.

    Raises: DoesNotFit if no mesh holds the load.
    """
    found = fitting(chip, model, load.sizes, candidates)
    if not found:
        # The error speaks of the mesh that comes closest.
        closest = max(candidates, key=lambda m: _cache_room(chip, model, m, load))
        check_fits(chip, model, closest, load.sizes)
    points = [decode_point(model, chip, mesh, load, load.batch) for mesh in found]
    return min(points, key=lambda point: point.step.seconds)


def best_within(
    model: Model, chip: Chip, candidates: Sequence[Mesh], load: Load, max_step_s: float
) -> Point:
    """Return the mesh and batch with the most tokens a second within a time per token.

    Raises: DoesNotFit if no mesh holds one user, InvalidInput if none is fast enough.
    """
    check(max_step_s > 0, f"a time per token of {max_step_s * 1e3:g} ms", "it is more than 0")
    one = dataclasses.replace(load, batch=1)
    fastest_one = fastest(model, chip, candidates, one)
    found = []
    for mesh in fitting(chip, model, one.sizes, candidates):
        batch = _largest_batch(model, chip, mesh, load, max_step_s)
        if batch:
            found.append(decode_point(model, chip, mesh, load, batch))
    if not found:
        raise InvalidInput(
            f"no mesh of {candidates[0].num_chips} x {chip.name} takes "
            f"{max_step_s * 1e3:g} ms per token or less",
            why=f"one user alone waits {fastest_one.step.seconds * 1e3:.2f} ms for a token "
            f"({fastest_one.mesh}); {fastest_one.step.binds} set the limit",
            fix="allow more time, quantize, or use more or faster chips",
            seconds=fastest_one.step.seconds,
        )
    return max(found, key=lambda point: point.tok_s)


def tradeoff(model: Model, chip: Chip, mesh: Mesh, load: Load) -> tuple[Point, ...]:
    """Return the batches of powers of two that fit."""
    users = room_on(chip, model, mesh, dataclasses.replace(load, batch=1).sizes).users
    batches = [2**i for i in range(users.bit_length())]
    while batches and not _fits(chip, model, mesh, load, batches[-1]):
        batches.pop()
    return tuple(decode_point(model, chip, mesh, load, batch) for batch in batches)


def _largest_batch(model: Model, chip: Chip, mesh: Mesh, load: Load, max_step_s: float) -> int:
    """Return the most sequences that fit and keep the time, in whole groups; 0 for none.

    Both the memory and the time of a step grow with them.
    """

    def too_many(rows: int) -> bool:
        batch = rows * mesh.num_groups
        slow = decode_point(model, chip, mesh, load, batch).step.seconds > max_step_s
        return slow or not _fits(chip, model, mesh, load, batch)

    users = room_on(chip, model, mesh, dataclasses.replace(load, batch=1).sizes).users
    most = max(1, users // mesh.num_groups)
    return bisect.bisect_left(range(1, most + 1), True, key=too_many) * mesh.num_groups


def _fits(chip: Chip, model: Model, mesh: Mesh, load: Load, batch: int) -> bool:
    sizes = dataclasses.replace(load, batch=batch).sizes
    return room_on(chip, model, mesh, sizes).users >= batch


def _cache_room(chip: Chip, model: Model, mesh: Mesh, load: Load) -> tuple[int, float]:
    room = room_on(chip, model, mesh, load.sizes)
    return room.users, room.cache_bytes


def fewest_chips(model: Model, chip: Chip, load: Load) -> Mesh | None:
    """Return a mesh of the fewest chips, one or a power of two, that holds the load."""
    alone = fitting(chip, model, load.sizes, (Mesh(),))
    return alone[0] if alone else smallest_that_fits(chip, model, load.sizes, above=1)
