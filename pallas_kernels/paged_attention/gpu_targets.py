"""The NVIDIA GPUs that the kernels are written for, and what differs between them.

Mosaic GPU takes the device's instructions when a program is lowered, so the choice is made while
it is traced: from the GPU at hand, or from a name for programs compiled without one.
"""

import dataclasses
import functools
from typing import Literal

import jax

from pallas_kernels.unavailable import KernelUnavailable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of GPU: how it multiplies tiles, how pages come into shared memory, its size.

    `min_jax` is the first version of JAX whose Mosaic compiles the kernels for it.
    """

    product: Literal["wgmma", "mma"]
    copies: Literal["tma", "cp.async"]
    num_sms: int
    shared_memory: int
    min_jax: tuple[int, int]


# wgmma exists on sm_90 only. Its successor on sm_100 keeps sums in a memory of its own, which pays
# for large tiles; decoding reads little and multiplies less, so mma.sync does there.
TARGETS = {
    "sm_80": Target(
        product="mma", copies="cp.async", num_sms=108, shared_memory=166_912, min_jax=(0, 12)
    ),
    "sm_90": Target(
        product="wgmma", copies="tma", num_sms=132, shared_memory=232_448, min_jax=(0, 11)
    ),
    "sm_100": Target(
        product="mma", copies="tma", num_sms=148, shared_memory=232_448, min_jax=(0, 12)
    ),
}

# Rows that a tensor core multiplies at once, by four warps of 16.
MMA_ROWS = 64


def swizzle(width: int) -> int:
    """Return in how many bytes rows of 16-bit tiles are permuted; operands have to agree."""
    return 128 if width % MMA_ROWS == 0 else 64


def copies_page(target: Target, page_size: int, width: int) -> bool:
    """Return whether a page's keys can be copied: `cp.async` has four warps copy whole tiles."""
    tiles = page_size // 8 * (width // (swizzle(width) // 2))
    return target.copies == "tma" or tiles % 4 == 0


def target_for(name: str | None) -> Target:
    """Return the target with a name, or that of the GPU at hand.

    Raises: KernelUnavailable when there is no GPU, or none of a kind that the kernels know.
    """
    name = name or _name_at_hand()
    reason = _reason(name)
    if reason is not None:
        raise KernelUnavailable(reason)
    return TARGETS[str(name)]


@functools.cache
def unavailable_reason() -> str | None:
    """Return why the GPU kernels cannot run in this process, or None when they can."""
    return _reason(_name_at_hand())


def _reason(name: str | None) -> str | None:
    if name is None:
        return "JAX sees no NVIDIA GPU in this process"
    if name not in TARGETS:
        return f"GPU kernels are for {', '.join(TARGETS)}, not {name}"
    needed = TARGETS[name].min_jax
    if jax.__version_info__ < needed:
        return f"on {name} the kernels need jax {needed[0]}.{needed[1]}, not {jax.__version__}"
    return None


@functools.cache
def _name_at_hand() -> str | None:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None
    return f"sm_{str(device.compute_capability).replace('.', '')}"
