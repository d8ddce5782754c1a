"""What is asked of the chips."""

import dataclasses
import math

from inferjax.errors import InvalidInput
from inferjax.planner.fit import RESERVED_SHARE, Sizes

MOST_CHUNKS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many sequences, how long, and what comes with them.

    batch: sequences that decode at the same time, on all chips together.
    context: tokens that each attends to.
    prompt: tokens of a prompt, by default `context`.
    arrivals_s: requests a second, for the time that they queue.
    network_s: the time of a message to the user and back.
    shared_prefix: tokens that all prompts begin with: fewer than those of a prompt, and of a
      context.
    chunk: prompt tokens computed at a time. page_size: tokens of a page of the cache.
    reserved_share: the share of memory that is kept back.

    Raises: InvalidInput for numbers that are no such sizes.
    """

    batch: int = 1
    context: int = 4096
    prompt: int | None = None
    arrivals_s: float = 0.0
    network_s: float = 0.0
    shared_prefix: int = 0
    chunk: int = 2048
    page_size: int = 64
    reserved_share: float = RESERVED_SHARE

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing."""
        sizes = {
            "batch": self.batch,
            "context": self.context,
            "prompt": self.prompt_tokens,
            "chunk": self.chunk,
            "page_size": self.page_size,
        }
        for name, size in sizes.items():
            check(size >= 1, f"{name} is {size}", "it counts from 1")
        shortest = min(self.prompt_tokens, self.context)
        check(
            0 <= self.shared_prefix < shortest,
            f"shared_prefix is {self.shared_prefix}",
            f"of a prompt of {self.prompt_tokens} tokens and a context of {self.context}, at least "
            "one token is a sequence's own",
            f"give at most {shortest - 1}",
        )
        check(
            0 <= self.reserved_share < 1,
            f"reserved_share is {self.reserved_share}",
            "it is a share of memory",
        )
        check(
            self.prompt_tokens <= MOST_CHUNKS * self.chunk,
            f"a prompt of {self.prompt_tokens} tokens in chunks of {self.chunk}",
            f"at most {MOST_CHUNKS} chunks are planned",
        )
        check_amount("arrivals_s", self.arrivals_s)
        check_amount("network_s", self.network_s)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of a prompt."""
        return self.context if self.prompt is None else self.prompt

    @property
    def sizes(self) -> Sizes:
        """What memory must hold."""
        return Sizes(
            batch=self.batch,
            context=self.context,
            chunk=min(self.chunk, self.prompt_tokens),
            page_size=self.page_size,
            shared_prefix=self.shared_prefix,
            reserved_share=self.reserved_share,
        )


def check(holds: bool, what: str, why: str, fix: str = "give another number") -> None:
    """Refuse a number that means nothing.

    Raises: InvalidInput.
    """
    if not holds:
        raise InvalidInput(what, why=why, fix=fix)


def check_amount(name: str, amount: float) -> None:
    """Refuse what is no amount of time, money or power.

    Raises: InvalidInput.
    """
    check(0 <= amount < math.inf, f"{name} is {amount}", "it is finite, and no less than 0")
