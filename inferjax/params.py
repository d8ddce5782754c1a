"""A model's weights as pytrees.

Weights are fused where the maths allows and stored so that every matmul contracts leading axes:
`wqkv [D, K, G+2, H]` holds, per key/value head, its G query heads and then its key and value, so
that sharding over K keeps a head's queries beside its keys; `w_in [D, 2, F]` holds gate and up.
"""

from jaxtyping import Array

from inferjax.pytree import pytree


@pytree
class NormParams:
    """Weights of one normalisation, which may have none."""

    weight: Array | None
    bias: Array | None = None


@pytree
class AttentionParams:
    """Weights of grouped-query attention; optional parts are None."""

    wqkv: Array
    wo: Array
    bqkv: Array | None = None
    bo: Array | None = None
    q_norm: NormParams | None = None
    k_norm: NormParams | None = None
    sinks: Array | None = None


@pytree
class LatentParams:
    """Weights of latent attention; `wk_b` and `wv_b` expand the latent into keys and values."""

    wq: Array
    wkv_a: Array
    kv_norm: NormParams
    wk_b: Array
    wv_b: Array
    wo: Array
    wq_a: Array | None = None
    q_norm: NormParams | None = None
    bq_a: Array | None = None
    bkv_a: Array | None = None
    bo: Array | None = None


@pytree
class MLPParams:
    """Weights of a dense feed-forward block; `w_in` is [D, 2, F] when gated, else [D, 1, F]."""

    w_in: Array
    w_down: Array
    b_in: Array | None = None
    b_down: Array | None = None


@pytree
class MoEParams:
    """Weights of a mixture of experts."""

    router: Array
    w_in: Array
    w_down: Array
    router_bias: Array | None = None
    score_bias: Array | None = None
    b_in: Array | None = None
    b_down: Array | None = None
    shared: MLPParams | None = None
    shared_gate: Array | None = None


@pytree
class LayerParams:
    """Weights of one decoder layer."""

    attention: AttentionParams | LatentParams
    ffn: MLPParams | MoEParams
    attention_in: NormParams | None = None
    attention_out: NormParams | None = None
    ffn_in: NormParams | None = None
    ffn_out: NormParams | None = None


@pytree
class Params:
    """All weights of a model; `layers` is a tuple, as a scan over stacked layers copies each.

    `labels [C, D]` is the head of a classifier.
    """

    embed: Array
    layers: tuple[LayerParams, ...]
    final_norm: NormParams | None
    head: Array | None = None
    positions: Array | None = None
    project_in: Array | None = None
    project_out: Array | None = None
    labels: Array | None = None
