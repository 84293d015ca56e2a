"""Mutations of real files and messages: a few bytes, words or pieces are changed, most of them where it hurts."""

from __future__ import annotations

import random
from collections.abc import Sequence

WORDS = [0, 1, 2, 3, 7, 63, 64, 127, 128, 255, 256, 4095, 4096, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**60, 2**62]
WORDS += [2**63 - 1, 2**63, 2**64 - 64, 2**64 - 3, 2**64 - 1]
WORDS += [0x3FF0000000000000, 0x7FF0000000000000, 0x7FF8000000000001]
"""Integers at limits, and the bits of 1.0, infinity and NaN."""

JSON_PIECES = [b"[", b"]", b"{", b"}", b",", b'"', b"null", b"true", b"-1", b"0", b"1e400", b"NaN", b"9" * 30, b'""']
JSON_PIECES += [b'"<f4"', b'"|O"', b'"V"', b'"S0"', b'"T"', b'"<M8[ns]"', b'">U3"', b'"f4,f4"', b'"(2,3)f8"', b'"|V8"']
JSON_PIECES += [b'"\\ud800"', b'"\\u0000"', b'[["a","<i8"],["a","<i8"]]', b"[[]]", b"[" * 50, b"[4611686018427387904]"]
"""What descriptions and settings consist of, right and wrong."""


def mutate(data: bytes, draw: random.Random, hot: Sequence[range] = ()) -> bytearray:
    """Return a changed copy. Nine of ten changes are in one of the ranges ``hot``, if there are any."""
    changed = bytearray(data)

    def place(length: int) -> int:
        part = draw.choice(hot) if hot and draw.random() < 0.9 else range(len(changed))
        return max(0, min(draw.choice(part) if part else 0, len(changed) - length))

    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        match draw.randrange(16):
            case 0 | 1:
                changed[place(1)] ^= 1 << draw.randrange(8)
            case 2 | 3:
                changed[place(1)] = draw.randrange(256)
            case 4 | 5 | 6 | 7 | 8:  # a word, on a boundary of words
                at = place(8) & ~7
                changed[at : at + 8] = word(draw, changed[at : at + 8]).to_bytes(8, "little")
            case 9:  # a word of four bytes
                at = place(4) & ~3
                changed[at : at + 4] = (word(draw, changed[at : at + 4]) & 0xFFFFFFFF).to_bytes(4, "little")
            case 10 | 11:  # one piece in place of another
                length = draw.randrange(1, 65)
                begin, end = place(length), place(length)
                changed[end : end + length] = changed[begin : begin + length]
            case 12:
                at, length = place(1), draw.randrange(1, 513)
                changed[at : at + length] = bytes([draw.choice((0, 0xFF))]) * len(changed[at : at + length])
            case 13:
                del changed[draw.randrange(len(changed)) :]
                changed += bytes(max(0, 16 - len(changed)))
            case 14:
                changed += draw.randbytes(draw.randrange(1, 65))
            case 15:
                at = place(1)
                changed[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
                changed += bytes(max(0, 16 - len(changed)))
    return changed


def mutate_text(text: bytes, draw: random.Random) -> bytes:
    """Return a changed copy of JSON or CSV: pieces are replaced, removed, repeated or exchanged."""
    changed = bytearray(text)
    for _ in range(draw.choice((1, 1, 2, 4))):
        begin = draw.randrange(len(changed) + 1)
        end = min(len(changed), begin + draw.choice((0, 1, 1, 2, 5, 20)))
        match draw.randrange(5):
            case 0 | 1:
                changed[begin:end] = draw.choice(JSON_PIECES)
            case 2:
                changed[begin:end] = str(draw.choice(WORDS)).encode()
            case 3:
                changed[begin:end] = changed[begin:end] * draw.randrange(3)
            case 4:
                changed[begin:end] = draw.randbytes(end - begin)
    return bytes(changed)


def word(draw: random.Random, before: bytes | bytearray) -> int:
    """Return a word of 64 bits that hurts, given what was there."""
    old = int.from_bytes(before, "little")
    changed = draw.choice((old + draw.choice((-1, 1, 4, 64)), old << 2, old * 3, -old, ~old))
    return draw.choice((draw.choice(WORDS), draw.getrandbits(64), changed)) % 2**64
