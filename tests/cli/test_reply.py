from types import SimpleNamespace

import pytest

from inferjax.cli.reply import collect


class Letters:
    """A detokenizer whose token n is the n-th letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


class HoldsLast(Letters):
    """Keeps one letter back, as a real detokenizer does in the middle of a character."""

    held = ""

    def push(self, token_id: int) -> str:
        shown, self.held = self.held, super().push(token_id)
        return shown

    def flush(self) -> str:
        return self.held


def make_event(*token_ids: int, finish: str | None = None) -> SimpleNamespace:
    count = len(token_ids)
    return SimpleNamespace(
        token_ids=list(token_ids),
        logprobs=[-0.5] * count,
        top_ids=[[7]] * count,
        top_logprobs=[[-0.1]] * count,
        chosen_logprobs=[[-3.0, -4.0]] * count,
        finish_reason=finish,
    )


def make_clock(*moments: float):
    remaining = list(moments)
    return lambda: remaining.pop(0)


def test_reply_joins_events_and_emits_every_piece():
    shown = []
    events = [make_event(0), make_event(1, 2), make_event(3, finish="eos")]
    reply = collect(events, HoldsLast(), num_prompt_tokens=4, emit=shown.append)
    assert reply.text == "".join(shown) == "abcd"
    assert reply.token_ids == [0, 1, 2, 3]
    assert reply.logprobs == [-0.5] * 4
    assert reply.top_ids == [[7]] * 4
    assert reply.chosen_logprobs == [[-3.0, -4.0]] * 4
    assert reply.finish_reason == "eos"


def test_reply_stop_string_drops_the_tokens_after_it():
    events = [make_event(0), make_event(1, 2, 3, 4), make_event(5)]
    reply = collect(events, Letters(), num_prompt_tokens=1, stops=["cd"])
    assert (reply.text, reply.stop, reply.finish_reason) == ("ab", "cd", "stop")
    assert reply.token_ids == [0, 1, 2, 3]


def test_reply_keeps_the_stop_string_if_asked():
    events = [make_event(0), make_event(1, 2, 3, 4)]
    reply = collect(events, Letters(), num_prompt_tokens=1, stops=["cd"], include_stop=True)
    assert (reply.text, reply.stop, reply.token_ids) == ("abcd", "cd", [0, 1, 2, 3])


def test_reply_stop_string_is_found_in_what_the_detokenizer_held():
    reply = collect([make_event(0, 1)], HoldsLast(), num_prompt_tokens=1, stops=["b"])
    assert (reply.text, reply.stop) == ("a", "b")


def test_reply_stop_string_waits_for_min_tokens():
    events = [make_event(0, 1), make_event(0, 1)]
    reply = collect(events, Letters(), num_prompt_tokens=1, stops=["b"], min_tokens=2)
    assert (reply.text, reply.token_ids) == ("aba", [0, 1, 0, 1])


def test_reply_keeps_the_text_before_an_interrupt():
    def events():
        yield make_event(0, 1)
        raise KeyboardInterrupt

    reply = collect(events(), Letters(), num_prompt_tokens=1, stops=["bx"])
    assert (reply.text, reply.finish_reason) == ("ab", "interrupted")


def test_reply_rates_leave_out_compilation():
    reply = collect(
        [make_event(0), make_event(1, 2, 3, 4)],
        Letters(),
        num_prompt_tokens=10,
        clock=make_clock(100.0, 103.0, 106.0),
        compile_seconds=lambda low, high: 1.0 * (high - low) / 3.0,
    )
    timings = reply.timings
    assert timings.first_token_s == pytest.approx(3.0)
    assert timings.prefill_tok_s == pytest.approx(10 / 2.0)
    assert timings.decode_tok_s == pytest.approx(4 / 2.0)
    assert timings.compile_s == pytest.approx(2.0)


def test_reply_without_tokens_has_no_rates():
    reply = collect([], Letters(), num_prompt_tokens=3)
    assert (reply.text, reply.token_ids) == ("", [])
    assert reply.timings.first_token_s is None
    assert reply.timings.decode_tok_s is None
