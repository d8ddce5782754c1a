"""Keys and values: what sequences take in memory, and what a step reads of them."""

from inferjax.config import CacheGroup, ModelConfig, cache_groups
from inferjax.kv.cache import group_bytes
from inferjax.kv.cache import token_bytes as token_bytes
from inferjax.planner.mesh import Mesh, shared_groups


def sequence_bytes(config: ModelConfig, tokens: int, dtype: str, *, page_size: int) -> int:
    """Return the bytes of the pages that a sequence of this length takes, on all chips together.

    A window's pages are given back as it moves on.
    """
    groups = cache_groups(config)
    return sum(group_bytes(g, _held_tokens(g, tokens, page_size), dtype) for g in groups)


def attended_tokens(group: CacheGroup, context: int) -> int:
    """Return how many cached tokens the next one attends to."""
    return context if group.window is None else min(context, group.window)


def read_bytes(config: ModelConfig, context: int, dtype: str) -> int:
    """Return the bytes that one sequence's next token reads, on all chips together."""
    return sum(group_bytes(g, attended_tokens(g, context), dtype) for g in cache_groups(config))


def chip_sequence_bytes(
    config: ModelConfig, mesh: Mesh, tokens: int, dtype: str, *, page_size: int
) -> float:
    """Return the bytes that a chip holds for every sequence of its tensor parallel group."""
    total = 0.0
    for group, share in shared_groups(config, mesh.tp):
        held = group_bytes(group, _held_tokens(group, tokens, page_size), dtype)
        total += held / (mesh.tp if share.by_sequence else 1)
    return total


def chip_read_bytes(
    config: ModelConfig, mesh: Mesh, context: int, dtype: str, *, sequences: int
) -> int:
    """Return the bytes that a chip reads when each of its group's sequences takes a step."""
    total = 0
    for group, share in shared_groups(config, mesh.tp):
        one = group_bytes(group, attended_tokens(group, context), dtype)
        total += one * (-(-sequences // mesh.tp) if share.by_sequence else sequences)
    return total


def _held_tokens(group: CacheGroup, tokens: int, page_size: int) -> int:
    pages = -(-tokens // page_size)
    if group.window is not None:
        # A window that starts within a page ends within another.
        pages = min(pages, -(-group.window // page_size) + 1)
    return pages * page_size
