"""The few shapes that an engine compiles, and what rounding up to them wastes."""

import dataclasses

# Measured on two CPU cores: a program's fixed part (most of it the sampler) and each layer.
SECONDS_PER_PROGRAM = 2.0
SECONDS_PER_LAYER = 0.15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """Sizes that are compiled: rows of a prefill, and slots of a decode.

    Every one of `num_groups` cache groups has a program that copies pages. `shifts` says whether
    sequences may outgrow their context, which takes one more.
    """

    prefill_rows: tuple[int, ...]
    decode_slots: tuple[int, ...]
    row_tokens: int
    num_layers: int
    num_groups: int = 1
    shifts: bool = False

    @property
    def num_programs(self) -> int:
        """Every prefill and decode size, and those that are there once: see `programs.py`."""
        sizes = len(self.prefill_rows) + len(self.decode_slots)
        return sizes + 3 + self.num_groups + self.shifts

    @property
    def seconds(self) -> float:
        """A rough estimate of the time that compiling takes."""
        with_layers = len(self.prefill_rows) + len(self.decode_slots) + 1
        return SECONDS_PER_PROGRAM * self.num_programs + (
            SECONDS_PER_LAYER * self.num_layers * with_layers
        )

    @property
    def padding(self) -> float:
        """The share of decoded rows that is padding when every number of sequences is as likely."""
        used = range(1, self.decode_slots[-1] + 1)
        padded = sum(bucket_for(self.decode_slots, n) for n in used)
        return 1 - sum(used) / padded

    def describe(self) -> str:
        """Return one line for people."""
        return (
            f"{self.num_programs} programs, about {self.seconds:.0f} s to compile on a CPU: "
            f"prefill of {_list(self.prefill_rows)} rows of {self.row_tokens} tokens, decode of "
            f"{_list(self.decode_slots)} sequences; padding about {self.padding:.0%} of decode"
        )


def sizes_up_to(largest: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the chosen sizes or the powers of two below `largest`, and `largest` itself."""
    if chosen is None:
        chosen = tuple(1 << i for i in range(largest.bit_length()))
    return (*(size for size in chosen if size < largest), largest)


def bucket_for(sizes: tuple[int, ...], count: int) -> int:
    """Return the smallest size that holds `count`; the largest must."""
    return next(size for size in sizes if size >= count)


def _list(sizes: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in sizes)
