"""What the compiled programs over slots may not contain: a second cache, all logits at once."""

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
from jaxpr_walk import equations
from slot_device import EXEC, ROWS, STEPS, WIDTH, Device
from tiny_models import tiny_model

import inferjax as ij
from inferjax.models.params import abstract_params
from inferjax.runtime import slots

MOVED = re.compile(r"= f32(\[[\d,]*\])\S* (?:copy|transpose)\(")


def test_score_rows_never_holds_the_logits_of_all_tokens():
    config = dataclasses.replace(tiny_model("llama").config, vocab_size=4099)  # no other axis's
    exec = dataclasses.replace(EXEC, score_chunk=4)
    device, targets = Device(tiny_model("llama"), exec), np.zeros((ROWS, WIDTH), np.int32)
    inputs = device.inputs(0, [np.zeros(3, np.int32)])

    def run(params: Any) -> Any:
        static: Any = {"config": config, "max_rows": ROWS, "exec": exec}
        return slots.score_rows(params, device.cache, inputs, targets, **static)

    jaxpr = jax.make_jaxpr(run)(abstract_params(config)).jaxpr
    shapes = [v.aval.shape for eqn in equations(jaxpr) for v in eqn.outvars]
    rows = {math.prod(shape) // 4099 for shape in shapes if 4099 in shape}
    assert exec.score_chunk in rows
    assert max(rows) <= max(exec.score_chunk, config.model_dim)
    assert (ROWS * WIDTH) not in rows


def test_compiled_programs_copy_no_cache():
    model = tiny_model("llama")
    device, static = Device(model, EXEC), {"config": model.config, "exec": EXEC}
    cache = ij.init_cache(model.config, num_pages=301, exec=EXEC)
    tables = tuple(table[:4] for table in device.tables)
    pages = np.zeros(4, np.int32)
    decode: Any = (model.params, cache, device.state, tables, np.ones(4, bool), np.int32(1))
    inputs = device.inputs(0, [np.zeros(3, np.int32)])
    lowered = [
        slots.decode_slots.lower(*decode, steps=STEPS, **static),
        slots.prefill_rows.lower(model.params, cache, inputs, max_rows=ROWS, **static),
        slots.copy_group_pages.lower(cache, pages, pages, group=0),
    ]
    pools = {"[" + ",".join(map(str, pool.shape)) + "]" for pool in jax.tree.leaves(cache)}
    for program in lowered:
        compiled: Any = program.compile()
        assert not pools & set(MOVED.findall(compiled.as_text()))
        size = sum(x.nbytes for x in jax.tree.leaves(cache))
        assert compiled.memory_analysis().alias_size_in_bytes >= size
