"""The GPU's attention together with the logarithms of sums of weights, which its kernels know."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention import gpu, transforms
from pallas_kernels.paged_attention.gpu_targets import Target, target_for
from pallas_kernels.unavailable import KernelUnavailable


def paged_attention(
    q: Float[Array, "B T K G W"],
    pool: Num[Array, "L P K C S W"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, "K G"] | None,
    factors: Float[Array, "L P K 2 S"] | None = None,
    target: str | None = None,
    splits: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G"]]:
    """Attend on the GPU; see the package for the contract with `lse`, `gpu` for the options.

    Raises: KernelUnavailable without a GPU, or for what the kernel does not know.
    """
    chosen = target_for(target)
    reason = gpu.unsupported(q, pool, value_dim, chosen)
    if reason is not None:
        raise KernelUnavailable(reason)
    attend = _attention(float(scale), value_dim, window, softcap, chosen, splits, interpret)
    arrays = (q, pool, layer, block_table, positions, lengths, sinks, factors)
    return attend(*transforms.operands(*arrays))


@functools.lru_cache(maxsize=256)
def _attention(
    scale: float,
    value_dim: int,
    window: int | None,
    softcap: float | None,
    target: Target,
    splits: int | None,
    interpret: Any,
) -> transforms.Attention:
    how = {"target": target, "splits": splits, "interpret": interpret}
    run = functools.partial(gpu.attend, scale=scale, window=window, softcap=softcap, **how)
    return transforms.transformable(
        run, scale=scale, value_dim=value_dim, window=window, softcap=softcap, lse=True
    )
