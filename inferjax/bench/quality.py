"""What fewer bits cost: how far a quantized model's predictions of a text are from the original's.

Every variant reads the same windows and predicts the same tokens: all but the first of a window,
each from those before it in its window. Logits exist for a chunk of positions at a time; of the
original, hidden states are kept, and its logits are computed again beside each variant's.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jaxtyping import Array, Float, Int

from inferjax.calibrate import RECIPES
from inferjax.calibrate import quantize as calibrated
from inferjax.calibrate.recipes import recipe_named
from inferjax.config import Exec, ModelConfig
from inferjax.errors import InvalidInput
from inferjax.kv.cache import init_cache, row_tables
from inferjax.models.decoder import check_head, unembed
from inferjax.models.params import num_parameters
from inferjax.models.quantized import dequantize
from inferjax.params import Params
from inferjax.quant.leaf import is_packed, size_of
from inferjax.quant.schemes import scheme_named
from inferjax.runtime.inputs import make_inputs
from inferjax.runtime.score import activations, map_chunks
from inferjax.runtime.steps import extend
from pallas_kernels.quant_matmul import QUANTIZED

# Positions whose logits exist at once, twice.
CHUNK = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to compare: every scheme by every recipe that has a choice there, and caches."""

    schemes: tuple[str, ...] = ("bfloat16", "int8", "int4", "int4-g64", "int4-g128", "fp8")
    recipes: tuple[str, ...] = ("rtn", "awq", "gptq")
    kv: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to store weights, or keys and values (`kv`)."""

    scheme: str = "float32"
    recipe: str = ""
    kv: str = ""


def variants_of(plan: Plan) -> tuple[Variant, ...]:
    """Return what a plan measures beside the original.

    Raises: UnsupportedConfig for an unknown scheme or recipe, or a dtype that no cache has.
    """
    for name in plan.recipes:
        recipe_named(name)
    found = []
    for scheme in plan.schemes:
        chosen = scheme_named(scheme).format in QUANTIZED
        recipes = [name for name in plan.recipes if chosen] or ["rtn"]
        found += [Variant(scheme=scheme, recipe=recipe) for recipe in recipes]
    for kind in plan.kv:
        Exec(kv_dtype=kind)
        found.append(Variant(kv=kind))
    return tuple(found)


def measure(
    params: Params,
    config: ModelConfig,
    windows: Int[np.ndarray, "W S"],
    calibration: Int[np.ndarray, "C T"] | None,
    plan: Plan,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Return the figures of every variant as plain values.

    The original has the weights in float32, also those that were packed before. `calibration` is
    what recipes look at; it must not be the text that is measured.

    Raises: UnsupportedConfig, UnsupportedModel for a model that predicts no tokens, InvalidInput
      when a recipe lacks its text.
    """
    variants = variants_of(plan)
    check_head(config, "vocabulary")
    if calibration is None and any(RECIPES.get(v.recipe) for v in variants):
        raise InvalidInput("a recipe looks at activations, and there is no calibration text")
    original = jax.tree.map(_float32, dequantize(params))
    rows = []
    reference: list[np.ndarray] = []
    bar = tqdm.tqdm(total=(1 + len(variants)) * len(windows), disable=not progress, unit="window")
    with bar:
        for variant in (Variant(), *variants):
            bar.set_description(title(variant))
            began = time.perf_counter()
            weights = _weights(original, config, variant, calibration)
            jax.block_until_ready(weights)
            made = time.perf_counter() - began
            states = _hidden_states(weights, config, windows, variant)
            figures = []
            for i, hidden in enumerate(states):
                if variant == Variant():
                    reference.append(hidden)
                pair = (_head(original), reference[i]), (_head(weights), hidden)
                figures.append(_compare(*pair, jnp.asarray(windows[i]), config=config))
                bar.update()
            rows.append(_row(variant, weights, config, figures, made, began))
    return {
        "plan": dataclasses.asdict(plan),
        "num_windows": len(windows),
        "window": windows.shape[1],
        "num_predicted": len(windows) * (windows.shape[1] - 1),
        "num_calibration_tokens": 0 if calibration is None else calibration.size,
        "rows": rows,
    }


def _weights(
    original: Params,
    config: ModelConfig,
    variant: Variant,
    calibration: Int[np.ndarray, "C T"] | None,
) -> Params:
    if not variant.recipe:
        return original
    return calibrated(original, config, variant.scheme, recipe=variant.recipe, tokens=calibration)


def _hidden_states(
    params: Params, config: ModelConfig, windows: Int[np.ndarray, "W S"], variant: Variant
) -> Iterator[Float[np.ndarray, "S D"]]:
    """Yield each window's final hidden states, without a cache unless its dtype is the question."""
    if not variant.kv:
        for row in windows:
            yield np.asarray(activations(params, config, row[None], taps=("final",))["final"][0])
        return
    exec = Exec(kv_dtype=variant.kv)
    num_pages = -(-windows.shape[1] // exec.page_size)
    cache = init_cache(config, num_pages=1 + num_pages, exec=exec)
    tables = (row_tables(1, num_pages),) * len(cache.groups)
    for row in windows:
        inputs = make_inputs(row[None], block_tables=tables)
        out, cache = extend(params, config, cache, inputs, taps=("final",), exec=exec)
        yield np.asarray(out.taps["final"][0])


@functools.partial(jax.jit, static_argnames="config")
def _compare(
    original: tuple[Params, Float[Array, "S D"]],
    variant: tuple[Params, Float[Array, "S D"]],
    tokens: Int[Array, " S"],
    *,
    config: ModelConfig,
) -> tuple[Array, Array, Array]:
    """Return per predicted token: what it costs in nats, the divergence, and whether both agree."""

    def one(rows: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, after, token = rows
        p = jax.nn.log_softmax(unembed(original[0], config, before))
        q = jax.nn.log_softmax(unembed(variant[0], config, after))
        cost = -jnp.take_along_axis(q, token[:, None], axis=1)[:, 0]
        divergence = (jnp.exp(p) * (p - q)).sum(-1)
        return cost, divergence, p.argmax(-1) == q.argmax(-1)

    return map_chunks(one, (original[1][:-1], variant[1][:-1], tokens[1:]), CHUNK)


def _head(params: Params) -> Params:
    """Leave out the layers, which `unembed` does not need."""
    return dataclasses.replace(params, layers=())


def _row(
    variant: Variant,
    weights: Params,
    config: ModelConfig,
    figures: Sequence[tuple[Array, Array, Array]],
    made: float,
    began: float,
) -> dict[str, Any]:
    cost, divergence, agreed = (np.concatenate(x) for x in zip(*figures, strict=True))
    num_bytes = sum(map(size_of, jax.tree.leaves(weights, is_leaf=is_packed)))
    mean = float(np.mean(cost, dtype=np.float64))
    return {
        **dataclasses.asdict(variant),
        "num_bytes": num_bytes,
        "bytes_per_weight": num_bytes / num_parameters(config),
        "nll": mean,
        "perplexity": float(np.exp(mean)),
        "kl_mean": float(np.mean(divergence, dtype=np.float64)),
        "kl_p99": float(np.quantile(divergence, 0.99)),
        "top1_agreement": float(np.mean(agreed)),
        "made_s": made,
        "seconds": time.perf_counter() - began,
    }


def _float32(leaf: Any) -> Array:
    return jnp.asarray(leaf, jnp.float32)


def title(variant: Any) -> str:
    """Return a variant's name, or a row's, for people."""
    facts = variant if isinstance(variant, dict) else dataclasses.asdict(variant)
    if facts["kv"]:
        return f"keys and values in {facts['kv']}"
    if not facts["recipe"]:
        return "float32 (the original)"
    return facts["scheme"] if facts["recipe"] == "rtn" else f"{facts['scheme']}, {facts['recipe']}"


def table(result: dict[str, Any]) -> str:
    """Return a result of `measure` for people."""
    best = result["rows"][0]["perplexity"]
    lines = [
        f"{result['num_predicted']} tokens in {result['num_windows']} windows of "
        f"{result['window']}; recipes looked at {result['num_calibration_tokens']} tokens of "
        "another text",
        "",
        f"{'weights':32}bytes/weight  perplexity   worse by   KL mean    KL p99  same top token",
    ]
    for row in result["rows"]:
        lines.append(
            f"{title(row):32}{row['bytes_per_weight']:12.3f}{row['perplexity']:12.4f}"
            f"{row['perplexity'] / best - 1:+11.2%}{row['kl_mean']:10.5f}{row['kl_p99']:10.4f}"
            f"{row['top1_agreement']:16.2%}"
        )
    return "\n".join(lines)
