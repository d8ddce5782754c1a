"""Whether a model fits, and how many users beside it."""

import dataclasses
from collections.abc import Iterator, Sequence

from inferjax.config import Attention, LayerSpec, MoE
from inferjax.errors import DoesNotFit
from inferjax.planner.cache import chip_sequence_bytes
from inferjax.planner.hardware import Chip
from inferjax.planner.leaves import bits_per_weight
from inferjax.planner.mesh import Mesh, head_share, meshes
from inferjax.planner.model import Model, largest_leaf, make_model
from inferjax.planner.work import weight_size

# What programs, fragments and other processes take of a chip's memory. vLLM's default
# gpu_memory_utilization leaves the same share.
RESERVED_SHARE = 0.1
# The schemes that are offered where a model does not fit, widest first.
_NARROWER = ("int8", "int4-g128")
MOST_CHIPS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of one chip, in bytes, and the sequences that fit all chips together.

    `sequence_bytes` is what every user takes, `prefix_bytes` what they share. `users` is 0 where
    weights and workspace alone are too large.
    """

    memory_bytes: float
    reserved_bytes: float
    weight_bytes: int
    workspace_bytes: int
    sequence_bytes: float
    users: int
    prefix_bytes: float = 0.0

    @property
    def cache_bytes(self) -> float:
        """What is left to the cache; negative where there is nothing."""
        taken = self.reserved_bytes + self.weight_bytes + self.workspace_bytes
        return self.memory_bytes - taken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What memory must hold: sequences of `context` tokens, `shared_prefix` of them in common.

    A step computes at most `chunk` prompt tokens, or one token of each of `batch` sequences.
    """

    batch: int
    context: int
    chunk: int = 2048
    page_size: int = 64
    shared_prefix: int = 0
    reserved_share: float = RESERVED_SHARE


def room_on(chip: Chip, model: Model, mesh: Mesh, sizes: Sizes) -> Room:
    """Return how a chip's memory is used, and how many users fit the mesh."""
    config, page = model.config, sizes.page_size

    def held(tokens: int) -> float:
        return chip_sequence_bytes(config, mesh, tokens, model.kv_dtype, page_size=page)

    common = sizes.shared_prefix // page * page
    reserved = chip.memory_bytes * sizes.reserved_share
    weights = weight_size(model, mesh)
    workspace = workspace_bytes(model, mesh, sizes)
    prefix = held(common) if common else 0.0
    one = held(sizes.context - common)
    left = chip.memory_bytes - reserved - weights - workspace - prefix
    users = int(left // one) * mesh.num_groups if left > 0 else 0
    return Room(
        memory_bytes=chip.memory_bytes,
        reserved_bytes=reserved,
        weight_bytes=weights,
        workspace_bytes=workspace,
        sequence_bytes=one,
        users=users,
        prefix_bytes=prefix,
    )


def workspace_bytes(model: Model, mesh: Mesh, sizes: Sizes) -> int:
    """Return what a step keeps beside weights and cache.

    That is three rows of the model's width a token (the residual, its norm, a block's result), the
    widest layer's queries, keys, values and feed-forward (of a mixture, all experts of a token and
    a row for each), and the logits twice in float32: as the head gives them, and as sampling
    changes them.
    """
    config = model.config
    rows = max(sizes.chunk, -(-sizes.batch // mesh.num_groups))
    inner = max(_layer_width(spec, config.model_dim, mesh.tp) for spec in config.layers)
    sequences = -(-sizes.batch // mesh.num_groups)
    vocab = config.vocab_size // mesh.tp if config.vocab_size % mesh.tp == 0 else config.vocab_size
    activations = rows * (3 * config.model_dim + inner) * model.activation_bytes
    return activations + 2 * sequences * vocab * 4


def _layer_width(spec: LayerSpec, dim: int, tp: int) -> int:
    share, a = head_share(spec.attention, tp), spec.attention
    if isinstance(a, Attention):
        heads = (share.num_q_heads + 2 * share.num_kv_heads) * a.head_dim
    else:
        heads = share.num_q_heads * (a.kv_rank + a.rope_dim)
    ffn = spec.ffn.ffn_dim
    hidden = 2 * (ffn // tp if ffn % tp == 0 else ffn)
    if isinstance(spec.ffn, MoE):
        return heads + spec.ffn.router.experts_per_token * (dim + hidden)
    return heads + hidden


def check_fits(chip: Chip, model: Model, mesh: Mesh, sizes: Sizes) -> Room:
    """Return the room of a model that fits with `sizes.batch` users.

    Raises: DoesNotFit, with what is missing and what would fit.
    """
    room = room_on(chip, model, mesh, sizes)
    if room.users >= sizes.batch:
        return room
    sequences = -(-sizes.batch // mesh.num_groups)
    cached = room.prefix_bytes + sequences * room.sequence_bytes
    missing = cached - room.cache_bytes
    raise DoesNotFit(
        f"{sizes.batch} x {sizes.context} tokens do not fit {mesh.num_chips} x {chip.name}: "
        f"{missing / 1e9:.1f} GB are missing on every chip",
        why=f"of {room.memory_bytes / 1e9:.0f} GB, weights take {room.weight_bytes / 1e9:.1f}, "
        f"a step {room.workspace_bytes / 1e9:.1f}, {room.reserved_bytes / 1e9:.1f} are kept back, "
        f"and keys and values of {sequences} x {sizes.context} tokens "
        f"{cached / 1e9:.1f} ({mesh})",
        fix="; or ".join(what_would_fit(chip, model, mesh, sizes, room)) or "use larger chips",
        missing_bytes=missing,
        room=room,
    )


def what_would_fit(chip: Chip, model: Model, mesh: Mesh, sizes: Sizes, room: Room) -> Iterator[str]:
    """Yield the changes that would each do alone: fewer users or bits, more chips."""
    if room.users > 0:
        yield f"serve {room.users} users at a time"
    dtype = _dtype_of(model)
    # Packed weights are computed with in float32, and so would keys and values be kept.
    keeping = f" with keys and values in {dtype}" if model.kv_dtype == dtype != "float32" else ""
    for scheme in _schemes_below(model):
        narrow = make_model(model.config, dtype=dtype, quantize=scheme, kv_dtype=model.kv_dtype)
        if room_on(chip, narrow, mesh, sizes).users >= sizes.batch:
            yield f"quantize the weights to {scheme}{keeping}"
            break
    if model.kv_dtype not in ("int8", "float8_e4m3fn"):
        narrow = dataclasses.replace(model, kv_dtype="int8")
        if room_on(chip, narrow, mesh, sizes).users >= sizes.batch:
            yield "keep keys and values in int8"
    more = smallest_that_fits(chip, model, sizes, above=mesh.num_chips)
    if more is not None:
        yield f"use {more.num_chips} chips ({more})"


def smallest_that_fits(chip: Chip, model: Model, sizes: Sizes, *, above: int) -> Mesh | None:
    """Return a mesh of the fewest chips that fits, among `above` times a power of two."""
    num_chips = 2 * above
    while num_chips <= MOST_CHIPS:
        found = fitting(chip, model, sizes, tuple(meshes(model.config, num_chips)))
        if found:
            return found[0]
        num_chips *= 2
    return None


def fitting(chip: Chip, model: Model, sizes: Sizes, candidates: Sequence[Mesh]) -> list[Mesh]:
    """Return the meshes that hold the model and its users."""
    return [m for m in candidates if room_on(chip, model, m, sizes).users >= sizes.batch]


def _schemes_below(model: Model) -> list[str]:
    dtype = _dtype_of(model)
    main = largest_leaf(model)
    bits = 8.0 * main.num_bytes / main.num_values
    return [scheme for scheme in _NARROWER if bits_per_weight(scheme, dtype) < bits - 0.5]


def _dtype_of(model: Model) -> str:
    return next(leaf.dtype for leaf in model.leaves if leaf.form is None)
