"""Every way to the same logits: dense, paged, reference attention, exact tiles; n samples."""

import jax
import numpy as np
import pytest
from paged_runs import (
    Layout,
    extend_chunks,
    keys_of,
    poisoned_cache,
    run_layout,
    shuffled_tables,
)
from tiny_models import padded, prompts_of, tiny_model
from tolerances import LOGITS_F32, TINY_LOGPROBS_F32

import inferjax as ij
from tests.kernels import native_library

FAMILIES = ("llama", "gpt_oss", "deepseek_v3", "gemma3_text", "gpt2")
LENGTHS = (1, 7, 20)
EXECS = {
    "xla": ij.Exec(page_size=8, attention="xla"),
    "cpu": ij.Exec(page_size=8, attention="cpu"),
    "reference": ij.Exec(page_size=8, attention="reference"),
    "exact": ij.Exec(page_size=8, exact=True),
}


def routes() -> list:
    quick = [("llama", name) for name in EXECS] + [("gpt_oss", "cpu"), ("deepseek_v3", "cpu")]
    quick += [("gpt_oss", "xla"), ("deepseek_v3", "xla"), ("gemma3_text", "cpu")]
    points = [(family, name) for family in FAMILIES for name in EXECS]
    return [p if p in quick else pytest.param(*p, marks=pytest.mark.slow) for p in points]


@pytest.mark.parametrize(("family", "name"), routes())
def test_paged_logits_equal_dense(family, name):
    if name == "cpu":
        native_library.require()
    model = tiny_model(family)
    rows, exec = prompts_of(model, LENGTHS), EXECS[name]
    dense = np.asarray(ij.forward(model.params, model.config, padded(rows, 20), list(LENGTHS)))
    tables = shuffled_tables(model, 3, 3, 12, seed=4)
    paged, _ = extend_chunks(model, poisoned_cache(model, 12, exec), tables, rows, 8, exec)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(paged[row, :length], dense[row, :length], **LOGITS_F32)


def test_several_rows_may_extend_one_sequence():
    model, exec = tiny_model("llama"), EXECS["xla"]
    (tokens,) = prompts_of(model, (20,))
    (table,) = shuffled_tables(model, 1, 3, 12, seed=5)
    whole, _ = extend_chunks(model, poisoned_cache(model, 12, exec), [table], [tokens], 20, exec)
    parts = [tokens[:8], tokens[8:13], tokens[13:]]
    cut, _ = extend_chunks(
        model,
        poisoned_cache(model, 12, exec),
        [np.repeat(table, 3, axis=0)],
        parts,
        8,
        exec,
        starts=np.array([0, 8, 13]),
    )
    joined = np.concatenate([cut[i, : len(part)] for i, part in enumerate(parts)])
    np.testing.assert_allclose(joined, whole[0], **LOGITS_F32)


def test_outputs_of_extend_agree():
    model, exec = tiny_model("llama"), EXECS["xla"]
    rows, tables = prompts_of(model, (1, 7, 8)), shuffled_tables(model, 3, 3, 12, seed=4)
    inputs = ij.make_inputs(padded(rows, 8), lengths=[1, 7, 8], block_tables=tables)
    values = {}
    for outputs in ("last", "all", "logprobs"):
        cache = poisoned_cache(model, 12, exec)
        out, _ = ij.extend(model.params, model.config, cache, inputs, outputs=outputs, exec=exec)
        values[outputs] = np.asarray(out.values)
    logprobs = np.asarray(jax.nn.log_softmax(values["all"]))
    for row, tokens in enumerate(rows):
        count = len(tokens)
        np.testing.assert_allclose(values["last"][row], values["all"][row, count - 1], **LOGITS_F32)
        known = logprobs[row, np.arange(count - 1), tokens[1:]]
        np.testing.assert_allclose(values["logprobs"][row, : count - 1], known, **TINY_LOGPROBS_F32)
        assert not values["logprobs"][row, count - 1 :].any()


@pytest.mark.parametrize(
    ("family", "exact"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
        pytest.param("gemma3_text", False, marks=pytest.mark.slow),
    ],
)
def test_sample_i_of_n_equals_that_sample_alone(family, exact):
    model, exec = tiny_model(family), ij.Exec(page_size=8, exact=exact)
    lengths, total = (7, 8, 17), 8  # below, at and beyond the edges of pages of 8
    prompts = prompts_of(model, lengths)
    values = {"temperature": [1.0, 0.7, 1.0], "top_p": [1.0, 1.0, 0.8]}
    out = ij.generate(
        model.params,
        model.config,
        padded(prompts, 17),
        list(lengths),
        key=keys_of((0, 1, 2)),
        max_new_tokens=total,
        sampling=ij.make_sampling(3, ignore_eos=True, **values),
        num_samples=3,
        exec=exec,
    )
    assert out.tokens.shape == (3, 3, total)
    assert len({tuple(row) for row in np.asarray(out.tokens).reshape(9, total)}) > 3
    for index in range(3):
        tokens, logprobs = run_layout(
            model,
            prompts,
            Layout(),
            total=total,
            sampling=values,
            exec=exec,
            sample_index=index,
        )
        np.testing.assert_array_equal(out.tokens[:, index], tokens)
        if exact:
            np.testing.assert_array_equal(out.logprobs[:, index], logprobs)
        else:
            np.testing.assert_allclose(out.logprobs[:, index], logprobs, **TINY_LOGPROBS_F32)


def test_samples_share_their_prompts_full_pages():
    """The cache inside `generate` holds one copy of the prompt, whatever the number of samples."""
    model, exec = tiny_model("llama"), ij.Exec(page_size=8)
    prompt = np.full((1, 80), 5, np.int32)

    def run(params):
        return ij.generate(
            params,
            model.config,
            prompt,
            key=jax.random.key(0),
            max_new_tokens=8,
            sampling=ij.make_sampling(1, ignore_eos=True),
            num_samples=16,
            exec=exec,
        ).tokens

    shape = ij.init_cache(model.config, num_pages=2, exec=exec).groups[0].values.shape
    pools = {
        var.aval.shape[1]
        for equation in inner_equations(jax.make_jaxpr(run)(model.params).jaxpr)
        for var in equation.outvars
        if len(var.aval.shape) == 6 and var.aval.shape[2:] == shape[2:]
    }
    assert pools
    assert max(pools) <= 1 + 10 + 16 * 2


def inner_equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from inner_equations(inner)
