"""Tokens that move to earlier positions without being computed again: only their keys turn.

A rotary key at position p is the unrotated key turned by p times an angle, so a constant turn moves
it to another position. What it says of its content stays what it was: tokens that are gone have
left their traces in it.

Source: StreamingLLM, arXiv 2309.17453, section 3.2, with the context shift of llama.cpp.
"""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from inferjax.config import LatentAttention, ModelConfig
from inferjax.kv.cache import KVCache, is_turned, rewrite_keys
from inferjax.layers.attention import turn_keys
from inferjax.layers.mla import turn_latents
from inferjax.sharding import automatic
from pallas_kernels.paged_attention.hadamard import spread


@jax.jit(static_argnames=("config", "distance"), donate_argnames=("cache",))
@automatic(lambda cache, *_: cache)
def shift_pages(
    cache: KVCache,
    sources: tuple[Int[Array, " M"], ...],
    targets: tuple[Int[Array, " M"], ...],
    *,
    config: ModelConfig,
    distance: int,
) -> KVCache:
    """Write pages of every group into `targets`, their tokens `distance` positions further back.

    A page may be its own target; a target of 0 or -1 is padding. The cache is donated.
    """
    pools, places = list(cache.groups), [0] * len(cache.groups)
    for spec in config.layers:
        group, attention = spec.group, spec.attention
        if isinstance(attention, LatentAttention):
            change = functools.partial(turn_latents, spec=attention, distance=-distance)
            value_dim = attention.kv_rank
        else:
            change = functools.partial(turn_keys, spec=attention, distance=-distance)
            value_dim = attention.head_dim
        if is_turned(pools[group]):
            change = functools.partial(_through, change)
        pages = (sources[group], targets[group])
        pools[group] = rewrite_keys(
            pools[group], places[group], *pages, change, value_dim=value_dim
        )
        places[group] += 1
    return KVCache(groups=tuple(pools))


def _through(change: Callable[[Array], Array], keys: Float[Array, "N K S W"]) -> Array:
    """Change keys that are held turned, as what they are."""
    return spread(change(spread(keys)))
