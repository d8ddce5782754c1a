"""Where the input channels of a layer's products can be scaled: what stands before divides by it.

A channel of a product's input is multiplied in the weight and divided where it comes from: in the
norm, in the columns of the values or of the up projection. The model stays the same; which weights
are large, and so kept best by rounding, does not.
"""

import dataclasses
import functools
from collections.abc import Callable

from jaxtyping import Array, Float

from inferjax.calibrate.products import Path, at, put
from inferjax.config import MLP, Attention, LatentAttention, LayerSpec, MoE, Norm
from inferjax.params import LayerParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Channels that can be scaled.

    `readers` are the weights that multiply them, with the first of the axes that they contract.
    Channels along `shared_axis` come from one place and need one scale. `divide` makes that place
    deliver them divided.
    """

    readers: tuple[tuple[Path, int], ...]
    shape: tuple[int, ...]
    divide: Callable[[LayerParams, Array], LayerParams]
    shared_axis: int | None = None

    def apply(self, layer: LayerParams, scales: Float[Array, "..."]) -> LayerParams:
        """Return a layer that computes the same with scaled channels."""
        layer = self.divide(layer, scales)
        for path, axis in self.readers:
            weight = at(layer, path)
            after = weight.ndim - axis - scales.ndim
            shape = (*(1,) * axis, *scales.shape, *(1,) * after)
            layer = put(layer, path, weight * scales.reshape(shape))
        return layer


def folds_of(spec: LayerSpec, layer: LayerParams) -> tuple[Fold, ...]:
    """Return the folds of a layer, none for inputs that nothing before them can scale."""
    ffn = _ffn_readers(spec)
    into_attention = _attention_readers(spec)
    if spec.residual == "parallel_shared":
        into_attention += ffn
    found = [
        _after_norm(layer, ("attention_in",), into_attention, spec.norm),
        _after_norm(layer, ("ffn_in",), ffn, spec.norm),
        _low_rank(spec, layer),
        _after_values(spec.attention),
        _after_up(spec.ffn, ("ffn",)),
    ]
    if isinstance(spec.ffn, MoE) and spec.ffn.shared is not None:
        found.append(_after_up(spec.ffn.shared, ("ffn", "shared")))
    return tuple(fold for fold in found if fold is not None)


def _attention_readers(spec: LayerSpec) -> tuple[tuple[Path, int], ...]:
    if isinstance(spec.attention, Attention):
        return ((("attention", "wqkv"), 0),)
    first = "wq" if spec.attention.q_rank is None else "wq_a"
    return ((("attention", first), 0), (("attention", "wkv_a"), 0))


def _ffn_readers(spec: LayerSpec) -> tuple[tuple[Path, int], ...]:
    if isinstance(spec.ffn, MLP):
        return ((("ffn", "w_in"), 0),)
    readers: list[tuple[Path, int]] = [(("ffn", "router"), 0), (("ffn", "w_in"), 1)]
    if spec.ffn.shared is not None:
        readers.append((("ffn", "shared", "w_in"), 0))
    if spec.ffn.shared_gate:
        readers.append((("ffn", "shared_gate"), 0))
    return tuple(readers)


def _after_norm(
    layer: LayerParams, path: Path, readers: tuple[tuple[Path, int], ...], norm: Norm
) -> Fold | None:
    weights = at(layer, path)
    if weights is None or weights.weight is None:
        return None
    divide = functools.partial(_divide_norm, path=path, offset=1.0 if norm.unit_offset else 0.0)
    return Fold(readers=readers, shape=weights.weight.shape, divide=divide)


def _low_rank(spec: LayerSpec, layer: LayerParams) -> Fold | None:
    """Latent attention may normalise compressed queries, too."""
    if not isinstance(spec.attention, LatentAttention) or spec.attention.q_rank is None:
        return None
    readers = ((("attention", "wq"), 0),)
    return _after_norm(layer, ("attention", "q_norm"), readers, spec.attention.norm)


def _divide_norm(layer: LayerParams, scales: Array, *, path: Path, offset: float) -> LayerParams:
    norm = at(layer, path)
    weight = (norm.weight + offset) / scales - offset
    bias = None if norm.bias is None else norm.bias / scales
    return put(layer, path, norm.replace(weight=weight, bias=bias))


def _after_values(attention: Attention | LatentAttention) -> Fold:
    """Attention mixes values of one channel only, and all queries of a key head share them."""
    readers = ((("attention", "wo"), 0),)
    if isinstance(attention, LatentAttention):
        return Fold(
            readers=readers,
            shape=(attention.num_q_heads, attention.value_dim),
            divide=_divide_expanded,
        )
    return Fold(
        readers=readers,
        shape=(attention.num_kv_heads, attention.q_per_kv, attention.head_dim),
        divide=_divide_values,
        shared_axis=1,
    )


def _divide_expanded(layer: LayerParams, scales: Float[Array, "N H"]) -> LayerParams:
    path = ("attention", "wv_b")
    return put(layer, path, at(layer, path) / scales[:, None])


def _divide_values(layer: LayerParams, scales: Float[Array, "K G H"]) -> LayerParams:
    for path in (("attention", "wqkv"), ("attention", "bqkv")):
        weight = at(layer, path)
        if weight is not None:
            values = weight[..., -1, :] / scales[:, 0].reshape(
                (1,) * (weight.ndim - 3) + (scales.shape[0], scales.shape[2])
            )
            layer = put(layer, path, weight.at[..., -1, :].set(values))
    return layer


def _after_up(ffn: MLP | MoE, path: Path) -> Fold | None:
    """The up projection passes on in proportion; so does relu, and no other activation."""
    if isinstance(ffn, MoE):
        if ffn.clamp is not None:
            return None
        shape: tuple[int, ...] = (ffn.router.num_experts, ffn.ffn_dim)
    elif ffn.gated or ffn.activation == "relu":
        shape = (ffn.ffn_dim,)
    else:
        return None
    return Fold(
        readers=(((*path, "w_down"), 0),),
        shape=shape,
        divide=functools.partial(_divide_up, path=path),
    )


def _divide_up(layer: LayerParams, scales: Float[Array, "... F"], *, path: Path) -> LayerParams:
    """Divide the last of the parts [..., C, F], which is up."""
    for name in ("w_in", "b_in"):
        weight = at(layer, (*path, name))
        if weight is None:
            continue
        # Experts come first: [E, D, C, F] and [E, C, F] beside scales [E, F].
        lead = scales.shape[:-1]
        middle = (1,) * (weight.ndim - 2 - len(lead))
        shape = (*lead, *middle, scales.shape[-1])
        values = weight[..., -1, :] / scales.reshape(shape)
        layer = put(layer, (*path, name), weight.at[..., -1, :].set(values))
    return layer
