import pytest

from inferjax.bench import policy
from inferjax.errors import InvalidInput


def operations(running: int, waiting: tuple[int, ...]) -> dict[tuple[str, int], float]:
    plan = policy.Plan(running=running, waiting=waiting, steps=12, prompt_len=40)
    result = policy.measure(plan)
    assert all(row["plan_ms"] > 0 and row["collect_ms"] > 0 for row in result["rows"])
    assert len(policy.table(result).splitlines()) == 4 + len(result["rows"])
    return {(row["kind"], row["waiting"]): row["operations"] for row in result["rows"]}


def test_policy_work_does_not_depend_on_who_waits():
    found = operations(8, (0, 50, 2000))
    assert set(found) == {
        *(("steady", n) for n in (0, 50, 2000)),
        *(("turnover", n) for n in (50, 2000)),
    }
    assert found["steady", 0] == found["steady", 50] == found["steady", 2000]
    assert found["turnover", 50] == found["turnover", 2000] > found["steady", 50]


def test_policy_work_is_linear_in_who_runs():
    few, many = (operations(n, (10,))["steady", 10] for n in (8, 32))
    # Pages are taken now and then, so it is not four times to the last operation.
    assert many == pytest.approx(4 * few, rel=0.3)


@pytest.mark.parametrize("changes", [{"running": 0}, {"waiting": (-1,)}, {"steps": 0}], ids=str)
def test_policy_refuses_sizes_that_measure_nothing(changes):
    with pytest.raises(InvalidInput):
        policy.measure(policy.Plan(**changes))
