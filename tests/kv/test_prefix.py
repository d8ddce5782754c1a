import hashlib
import struct

import pytest

from inferjax.kv.prefix import cache_root, page_digests


def digests(tokens, page_size=4, root=b"", count=100):
    known = []
    page_digests(root, tokens, page_size, known, count)
    return known


def test_digest_is_sha256_of_parent_and_tokens():
    first = hashlib.sha256(b"root" + struct.pack("<2i", 7, -1)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 1 << 20, 0)).digest()
    assert digests([7, -1, 1 << 20, 0, 5], 2, b"root") == [first, second]


def test_chain_is_extended_and_not_computed_again():
    tokens = list(range(13))
    known = digests(tokens, count=2)
    assert len(known) == 2
    page_digests(b"", tokens, 4, known, 3)
    assert known == digests(tokens)
    known[-1] = b"kept"
    page_digests(b"", tokens, 4, known, 3)
    assert known[-1] == b"kept"


@pytest.mark.parametrize("change", [0, 5, 7])
def test_digest_depends_on_every_token_before(change):
    tokens = list(range(12))
    other = list(tokens)
    other[change] += 1
    pairs = zip(digests(tokens), digests(other), strict=True)
    assert [a == b for a, b in pairs] == [change // 4 > page for page in range(3)]


def test_roots_differ_whenever_their_parts_do():
    kinds = [
        (),
        ("",),
        (b"",),
        (None,),
        (0,),
        ("0",),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        (b"abc",),
        ("a", None, "bc"),
        ("\ud800",),
        (-1,),
    ]
    assert len({cache_root(*parts) for parts in kinds}) == len(kinds)
    assert cache_root("a", 1) == cache_root("a", 1)
