import json

import pytest
from tiny_models import tiny_model

from inferjax.bench import overhead
from inferjax.config import Exec
from inferjax.errors import InvalidInput

PLAN = overhead.Plan(batches=(2,), context=5, num_tokens=8, steps=2, rounds=2)


@pytest.mark.slow
def test_overhead_compares_the_same_work():
    result = overhead.measure(tiny_model("llama"), PLAN, exec=Exec(page_size=8))
    (row,) = json.loads(json.dumps(result))["rows"]
    assert row["batch"] == 2
    assert min(row["bare_ms"], row["engine_ms"], row["reporting_ms"]) > 0
    assert row["overhead"] == pytest.approx(row["engine_ms"] / row["bare_ms"] - 1)
    assert all(ms >= 0 for ms in row["host_ms"].values())
    assert overhead.table(result).count("\n") >= 5


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": 3}, "whole dispatches"),
        ({"num_tokens": 2}, "whole dispatches"),
        ({"batches": (0,)}, "sizes"),
        ({"context": 250}, "tokens of context"),
    ],
    ids=str,
)
def test_overhead_refuses_a_plan_that_does_not_fit(changes, text):
    fields = {name: getattr(PLAN, name) for name in PLAN.__dataclass_fields__}
    with pytest.raises(InvalidInput, match=text):
        overhead.measure(tiny_model("llama"), overhead.Plan(**{**fields, **changes}))
