"""A plan says whether anything is to be done, and leaves out who has ended."""

from inferjax.engine.plan import Chunk, Copy, Plan
from inferjax.engine.sequence import Phase, Sequence


def sequence(phase: Phase) -> Sequence:
    return Sequence(uid=0, tokens=[1, 2], prompt_len=2, max_len=4, order=0, phase=phase)


def test_a_plan_that_only_moves_rows_is_not_empty():
    assert Plan().empty
    assert not Plan(moves=[(2, 0)]).empty
    assert not Plan(copies=[Copy(group=0, source=1, target=2)]).empty


def test_sequences_that_ended_after_the_plan_was_made_are_dropped():
    live, ended = sequence(Phase.DECODE), sequence(Phase.FINISHED)
    chunks = [Chunk(sequence=s, start=0, stop=2, last=True) for s in (ended, live)]
    plan = Plan(placed=[ended, live], decode=[live, ended], chunks=chunks, steps=4)
    plan.drop_finished()
    assert (plan.placed, plan.decode, plan.chunks) == ([live], [live], chunks[1:])
