"""Named shapes that tests, benchmarks and tuners run for every implementation."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One ragged batch: new tokens and cached context per row, and the features in play."""

    name: str
    new_tokens: tuple[int, ...]
    context: tuple[int, ...]
    num_kv_heads: int = 2
    q_per_kv: int = 2
    width: int = 16
    planes: int = 2
    value_dim: int = 16
    page_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (
    Case(name="decode", new_tokens=(1, 1, 1), context=(0, 7, 30)),
    Case(name="decode at page edges", new_tokens=(1, 1, 1), context=(7, 8, 9)),
    Case(name="prefill", new_tokens=(20, 3, 1), context=(0, 0, 0)),
    Case(name="chunk on a context", new_tokens=(5, 9, 2), context=(11, 0, 24)),
    Case(name="a row of padding only", new_tokens=(4, 0, 1), context=(3, 0, 12)),
    Case(name="one kv head", new_tokens=(3, 1), context=(5, 16), num_kv_heads=1, q_per_kv=4),
    Case(name="no grouping", new_tokens=(3, 1), context=(5, 16), num_kv_heads=4, q_per_kv=1),
    Case(name="window below a page", new_tokens=(6, 1), context=(10, 29), window=5),
    Case(name="window of pages", new_tokens=(6, 1), context=(10, 60), window=17),
    Case(name="window of one", new_tokens=(2, 1), context=(10, 3), window=1),
    Case(name="softcap", new_tokens=(6, 1), context=(10, 3), softcap=2.0),
    Case(name="sinks", new_tokens=(6, 1, 0), context=(10, 0, 0), sinks=True),
    Case(name="sinks and window", new_tokens=(6, 1), context=(10, 33), sinks=True, window=6),
    Case(
        name="latent",
        new_tokens=(4, 1),
        context=(9, 20),
        num_kv_heads=1,
        q_per_kv=4,
        width=24,
        planes=1,
        value_dim=16,
    ),
    Case(name="odd sizes", new_tokens=(3, 2), context=(4, 13), width=12, value_dim=12, page_size=5),
)
