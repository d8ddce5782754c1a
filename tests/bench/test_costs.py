import dataclasses

import jax
import jax.numpy as jnp
import pytest

from inferjax.bench.costs import head_flops, matmul_flops_per_token, weight_bytes_per_step
from inferjax.config import MLP, Attention, LayerSpec, ModelConfig, MoE, Norm, Router
from inferjax.models.params import abstract_params, num_parameters
from inferjax.models.quantized import quantize
from inferjax.quant.leaf import size_of

ATTENTION = Attention(num_q_heads=4, num_kv_heads=2, head_dim=8, scale=0.35)
DENSE = MLP(ffn_dim=48)
EXPERTS = MoE(router=Router(kind="softmax", num_experts=8, experts_per_token=2), ffn_dim=24)


def make_config(*, ffn=DENSE, tied=True) -> ModelConfig:
    layer = LayerSpec(attention=ATTENTION, ffn=ffn, norm=Norm())
    return ModelConfig(
        family="llama",
        vocab_size=100,
        model_dim=32,
        max_context=64,
        layers=(layer,) * 2,
        final_norm=Norm(),
        tied=tied,
    )


def make_params(config: ModelConfig):
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), abstract_params(config))


def test_weight_bytes_of_a_tied_dense_model_are_all_its_weights():
    config = make_config()
    assert weight_bytes_per_step(make_params(config), config, batch=1) == 4 * num_parameters(config)


@pytest.mark.parametrize("batch", [1, 32])
def test_weight_bytes_count_only_the_rows_of_an_embedding_that_is_not_the_head(batch):
    config = make_config(tied=False)
    expected = 4 * (num_parameters(config) - (100 - batch) * 32)
    assert weight_bytes_per_step(make_params(config), config, batch=batch) == expected


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weight_bytes_of_packed_weights_are_those_of_their_codes_and_scales(scheme):
    config = make_config(tied=False)
    packed = jax.eval_shape(lambda: quantize(make_params(config), config, scheme))
    leaves = jax.tree.leaves(packed)
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    table = size_of(packed.embed)
    expected = stored - table * 99 // 100
    assert weight_bytes_per_step(packed, config, batch=1) == expected


def test_weight_bytes_count_only_the_experts_that_are_chosen():
    config = make_config(ffn=EXPERTS)
    one_expert = 4 * 3 * 32 * 24
    total = 4 * num_parameters(config)
    params = make_params(config)
    assert weight_bytes_per_step(params, config, batch=1) == total - 2 * 6 * one_expert
    assert weight_bytes_per_step(params, config, batch=1000) == total


def test_flops_are_two_per_weight_that_a_token_meets():
    dense = make_config()
    norms = 5 * 32
    # Norm weights multiply too; they are below a thousandth of a real model and not worth a rule.
    assert matmul_flops_per_token(dense) == 2 * num_parameters(dense)
    assert 2 * norms < matmul_flops_per_token(dense) / 50
    untied = dataclasses.replace(dense, tied=False)
    assert matmul_flops_per_token(untied) == matmul_flops_per_token(dense)
    sparse = make_config(ffn=EXPERTS)
    idle = 2 * 6 * 3 * 32 * 24
    assert matmul_flops_per_token(sparse) == 2 * (num_parameters(sparse) - idle)
    assert head_flops(dense) == 2 * 100 * 32
