"""The inference engine you can jit, vmap, grad and shard."""

from inferjax import calibrate
from inferjax.checkpoint.load import Model, load
from inferjax.checkpoint.save import save
from inferjax.config import Exec, ModelConfig, Pooling
from inferjax.engine import Completion, Delta, Engine, EngineConfig
from inferjax.errors import InferjaxError
from inferjax.generation import stream
from inferjax.kv.cache import KVCache, init_cache
from inferjax.models.quantized import dequantize, fake_quantize, quantize
from inferjax.rules import Rules
from inferjax.runtime.arguments import raise_for_status
from inferjax.runtime.beam import beam_search
from inferjax.runtime.beam_rules import Beams
from inferjax.runtime.generate import Generation, generate
from inferjax.runtime.inputs import (
    DecodeState,
    StepInputs,
    StepOutput,
    init_state,
    insert,
    make_inputs,
    release,
)
from inferjax.runtime.pooled import classify, embed
from inferjax.runtime.score import activations, forward, score
from inferjax.runtime.steps import decode, extend, prefill, start, verify
from inferjax.sampling import Sampling, SamplingParams, make_sampling, sample

__all__ = [
    "Beams",
    "Completion",
    "DecodeState",
    "Delta",
    "Engine",
    "EngineConfig",
    "Exec",
    "Generation",
    "InferjaxError",
    "KVCache",
    "Model",
    "ModelConfig",
    "Pooling",
    "Rules",
    "Sampling",
    "SamplingParams",
    "StepInputs",
    "StepOutput",
    "activations",
    "beam_search",
    "calibrate",
    "classify",
    "decode",
    "dequantize",
    "embed",
    "extend",
    "fake_quantize",
    "forward",
    "generate",
    "init_cache",
    "init_state",
    "insert",
    "load",
    "make_inputs",
    "make_sampling",
    "prefill",
    "quantize",
    "raise_for_status",
    "release",
    "sample",
    "save",
    "score",
    "start",
    "stream",
    "verify",
]
