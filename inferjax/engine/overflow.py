"""What becomes of sequences that outgrow their context: attention-sink streaming, which loses text.

A sequence that is full drops its middle. The first tokens stay, since trained attention rests on
them (the sinks), and so do the latest. These move back to the freed positions with the keys they
have, so the model never sees a position that it was not trained on, and nothing is computed again.

It is lossy: what is dropped is forgotten, and the kept keys and values were computed while it was
still seen. A sequence that loses its pages afterwards computes its kept tokens anew, without what
the dropped ones left in them: other numbers, no worse ones.

Source: StreamingLLM, arXiv 2309.17453; dropping half at once is llama.cpp's context shift.
"""

import dataclasses

from inferjax.engine.sequence import Sequence
from inferjax.errors import UnsupportedConfig

OVERFLOWS = ("refuse", "lossy_sinks")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Middle:
    """What a sequence of `context` tokens drops when it is full: [start, stop), whole pages.

    It is the same for every sequence, whatever runs beside it, so that results depend on nothing
    but the request.
    """

    context: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Tokens that are dropped at once, and positions that the later ones move back."""
        return self.stop - self.start

    @property
    def num_recent(self) -> int:
        """Tokens behind the middle of a full sequence."""
        return self.context - self.stop

    def excess(self, prompt_len: int, num_output: int) -> int:
        """Return how many tokens a prompt must lose; what is left is as long as after a drop.

        A prompt without output may fill the context, others must leave a place.
        """
        if prompt_len < self.context or not num_output:
            return max(0, prompt_len - self.context)
        return prompt_len - (self.context - self.size)

    def admit(self, sequence: Sequence) -> None:
        """Fit a new sequence into the context: its prompt now, its output when that is full."""
        num_output = sequence.max_len - sequence.prompt_len
        excess = self.excess(sequence.prompt_len, num_output)
        sequence.drop(self.start, self.start + excess, self.context)


def middle_of(context: int, sink_tokens: int, page_size: int) -> Middle:
    """Return the middle: half of what is behind the sinks, which are rounded up to whole pages.

    Raises: UnsupportedConfig when no page is left to drop.
    """
    first = -(-sink_tokens // page_size)
    count = (context // page_size - first) // 2
    if count < 1:
        raise UnsupportedConfig(
            f"a context of {context} tokens and {sink_tokens} sink tokens",
            why=f"two pages of {page_size} tokens behind the sinks are needed: one to drop",
            fix="use fewer sink tokens, smaller pages or a longer max_len",
        )
    return Middle(context=context, start=first * page_size, stop=(first + count) * page_size)
