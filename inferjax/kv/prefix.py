"""Names for the contents of pages: a chain of digests over everything that they depend on.

A page's keys and values depend on its own tokens, on all tokens before them, and on the model and
cache they were computed with. Equal digests therefore mean equal contents. SHA-256 and not a faster
hash: whoever can make two prompts collide reads another user's cache.
"""

import hashlib
import struct
from collections.abc import Sequence


def cache_root(*parts: str | bytes | int | None) -> bytes:
    """Return the digest that a chain starts from.

    `parts` are what must agree before two sequences may share pages: salt, adapter contents, model
    revision, dtype, cache layout. Each is written with its kind and length, so that no two lists of
    parts have the same bytes.
    """
    digest = hashlib.sha256()
    for part in parts:
        kind, content = _canonical(part)
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return digest.digest()


def page_digests(
    root: bytes, tokens: Sequence[int], page_size: int, known: list[bytes], count: int
) -> None:
    """Extend `known`, the digests of the first full pages of `tokens`, to `count` of them.

    A page's digest is that of its parent's (the root's for the first page) and of its tokens as
    little-endian int32.
    """
    layout = struct.Struct(f"<{page_size}i")
    parent = known[-1] if known else root
    for page in range(len(known), min(count, len(tokens) // page_size)):
        content = layout.pack(*tokens[page * page_size : (page + 1) * page_size])
        parent = hashlib.sha256(parent + content).digest()
        known.append(parent)


def _canonical(part: str | bytes | int | None) -> tuple[bytes, bytes]:
    match part:
        case None:
            return b"n", b""
        case bytes():
            return b"b", part
        case str():
            return b"s", part.encode(errors="surrogatepass")
        case int():
            return b"i", b"%d" % part
