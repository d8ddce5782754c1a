"""A plan: what fits, how fast it can be at best, what that costs, and on which mesh.

Pure functions of a model's config and a chip's row; nothing is loaded, compiled or measured.
"""

import dataclasses

from inferjax.planner.fit import MOST_CHIPS, Room, check_fits, room_on
from inferjax.planner.hardware import Chip
from inferjax.planner.load import Load, check, check_amount
from inferjax.planner.mesh import Mesh, check_mesh, meshes
from inferjax.planner.mesh import notes as mesh_notes
from inferjax.planner.model import Model
from inferjax.planner.price import dollars_per_million, joules_per_token
from inferjax.planner.savings import SharedPrefix, Speculation, speculation
from inferjax.planner.search import Point, best_within, fastest, tradeoff
from inferjax.planner.steps import StepTime, step_time, total_time
from inferjax.planner.waiting import FirstToken, queue_s
from inferjax.planner.work import decode_work, prefill_work


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Money and energy of tokens; None where no price, or no power, is known.

    Output tokens are those of decoding; input tokens those of prompts that nothing else delays.
    """

    output_dollars_per_million: float | None
    input_dollars_per_million: float | None
    joules_per_output_token: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a load is at best on a mesh of chips.

    `curve` is the trade-off between throughput and latency on this mesh, up to the users that fit.
    `notes` say what the mesh does not divide.
    """

    chip: Chip
    mesh: Mesh
    load: Load
    room: Room
    decode: Point
    first_token: FirstToken
    cost: Cost
    curve: tuple[Point, ...]
    notes: tuple[str, ...]
    speculation: Speculation | None = None
    prefix: SharedPrefix | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """How drafting is done: see `savings.speculation`.

    `share` is the time of drafting a token as a share of a plain step. 0 stands for drafts that
    cost nothing, such as those looked up in the prompt.
    """

    accept: float
    draft_len: int = 4
    share: float = 0.0


def make_plan(
    model: Model,
    chip: Chip,
    num_chips: int,
    load: Load,
    *,
    mesh: Mesh | None = None,
    max_step_s: float | None = None,
    price_per_chip_hour: float | None = None,
    watts: float | None = None,
    drafts: Drafts | None = None,
) -> Plan:
    """Return the plan of a load on a mesh, by default on the best one.

    With `max_step_s`, a limit on the time per token, mesh and batch are those with the most
    tokens a second within it; `load.batch` is not used then. `watts` replaces the chip's own.

    Raises: DoesNotFit, ShardingError, InvalidInput.
    """
    check(1 <= num_chips <= MOST_CHIPS, f"{num_chips} chips", f"1 to {MOST_CHIPS} are planned for")
    longest, context = max(load.context, load.prompt_tokens), model.config.max_context
    check(longest <= context, f"{longest} tokens", f"the model's context is {context}")
    if mesh is not None:
        check_mesh(model.config, mesh, num_chips)
    candidates = tuple(meshes(model.config, num_chips)) if mesh is None else (mesh,)
    if max_step_s is not None:
        best = best_within(model, chip, candidates, load, max_step_s)
        load = dataclasses.replace(load, batch=best.batch)
    else:
        best = fastest(model, chip, candidates, load)
    room = check_fits(chip, model, best.mesh, load.sizes)
    first, own_s = _first_token(model, chip, best, load)
    return Plan(
        chip=chip,
        mesh=best.mesh,
        load=load,
        room=room,
        decode=best,
        first_token=first,
        cost=_cost(chip, best, load, own_s, price_per_chip_hour, watts),
        curve=tradeoff(model, chip, best.mesh, load),
        notes=_notes(model, best.mesh),
        speculation=_speculation(model, chip, best, load, drafts),
        prefix=_prefix(model, chip, best, load, room),
    )


def _notes(model: Model, mesh: Mesh) -> tuple[str, ...]:
    headless = model.config.head != "vocabulary"
    said = "the model predicts no tokens: of its times only the prefill's means anything"
    return (*([said] if headless else []), *mesh_notes(model.config, mesh))


def prefill_time(model: Model, chip: Chip, mesh: Mesh, load: Load, cached: int) -> StepTime:
    """Return the floor of computing a prompt, chunk by chunk, with `cached` tokens known."""
    steps, length = [], load.prompt_tokens
    for start in range(cached, length, load.chunk):
        stop = min(start + load.chunk, length)
        work = prefill_work(model, mesh, start=start, stop=stop, last=stop == length)
        steps.append(step_time(chip, model, work, rows=stop - start))
    return total_time(steps)


def _first_token(model: Model, chip: Chip, best: Point, load: Load) -> tuple[FirstToken, float]:
    """Return the terms of the first token, and the seconds of the prompt's own computation."""
    own = prefill_time(model, chip, best.mesh, load, load.shared_prefix)
    waits = queue_s(
        step_s=best.step.seconds,
        prefill_s=own.seconds,
        arrivals_s=load.arrivals_s,
        num_groups=best.mesh.num_groups,
    )
    first = FirstToken(
        network_s=load.network_s,
        queue_s=waits,
        prefill_s=own.seconds,
        prefill_binds=own.binds,
    )
    return first, own.seconds


def _cost(
    chip: Chip,
    best: Point,
    load: Load,
    prefill_s: float,
    price: float | None,
    watts: float | None,
) -> Cost:
    num_chips, power = best.mesh.num_chips, chip.watts if watts is None else watts
    for name, given in (("price", price), ("watts", power)):
        check_amount(name, given or 0.0)
    input_tok_s = best.mesh.num_groups * load.prompt_tokens / prefill_s
    return Cost(
        output_dollars_per_million=None
        if price is None
        else dollars_per_million(price, num_chips, best.tok_s),
        input_dollars_per_million=None
        if price is None
        else dollars_per_million(price, num_chips, input_tok_s),
        joules_per_output_token=None
        if power is None
        else joules_per_token(power, num_chips, best.tok_s),
    )


def _speculation(
    model: Model, chip: Chip, best: Point, load: Load, drafts: Drafts | None
) -> Speculation | None:
    if drafts is None:
        return None
    check_amount("share", drafts.share)
    width = max(0, drafts.draft_len) + 1
    work = decode_work(
        model, best.mesh, batch=best.batch, context=load.context, tokens_per_sequence=width
    )
    rows = -(-best.batch // best.mesh.num_groups) * width
    return speculation(
        accept=drafts.accept,
        draft_len=drafts.draft_len,
        plain_s=best.step.seconds,
        verify_s=step_time(chip, model, work, rows=rows).seconds,
        draft_s=drafts.share * best.step.seconds,
    )


def _prefix(model: Model, chip: Chip, best: Point, load: Load, room: Room) -> SharedPrefix | None:
    if not load.shared_prefix:
        return None
    with_it = prefill_time(model, chip, best.mesh, load, load.shared_prefix)
    whole = prefill_time(model, chip, best.mesh, load, 0)
    alone = dataclasses.replace(load, shared_prefix=0).sizes
    return SharedPrefix(
        num_tokens=load.shared_prefix,
        prefill_s=with_it.seconds,
        saved_s=whole.seconds - with_it.seconds,
        users=room.users,
        users_without=room_on(chip, model, best.mesh, alone).users,
    )
