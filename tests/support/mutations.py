"""Payloads made wrong on purpose: bits, lengths, types, nesting, numbers."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

HUGE_LENGTHS = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff"]
NUMBERS = [0, 1, -1, 31, 64, 1 << 20, (1 << 20) + 1, 1 << 31, 1 << 32, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1]
OTHERS: list[Any] = [
    None,
    True,
    False,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "GPU",
    "x" * 300,
    b"",
    b"\0" * 32,
    [],
    {},
    [[]],
]


class Mutator:
    """Turns real payloads into broken ones, the same ones for the same seed."""

    def __init__(self, payloads: Sequence[bytes], seed: int) -> None:
        self._random = Random(seed)
        self._payloads = list(payloads)
        self._ways = [self._flip, self._cut, self._splice, self._lengthen, self._nest, *[self._replace] * 12]

    def broken(self) -> bytes:
        """Return the next payload."""
        return self._random.choice(self._ways)(self._random.choice(self._payloads))

    def _flip(self, payload: bytes) -> bytes:
        data = bytearray(payload)
        for _ in range(self._random.choice([1, 1, 1, 2, 8])):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _cut(self, payload: bytes) -> bytes:
        end = self._random.randrange(len(payload))
        return payload[:end] if self._random.random() < 0.7 else payload[end:]

    def _splice(self, payload: bytes) -> bytes:
        other = self._random.choice(self._payloads)
        return payload[: self._random.randrange(len(payload))] + other[self._random.randrange(len(other)) :]

    def _lengthen(self, payload: bytes) -> bytes:
        at = self._random.randrange(len(payload))
        return payload[:at] + self._random.choice(HUGE_LENGTHS) + payload[at:]

    def _nest(self, payload: bytes) -> bytes:
        at = self._random.randrange(len(payload))
        depth = self._random.choice([20, 400, 5_000])
        return payload[:at] + self._random.choice([b"\x91", b"\x81\xa1a"]) * depth + payload[at:]

    def _replace(self, payload: bytes) -> bytes:
        """Put something else in the place of one value, and write the payload anew."""
        value = msgspec.msgpack.decode(payload)
        holder: Any = value[1] if self._random.random() < 0.8 else value  # mostly inside the events
        while True:
            key = self._random.choice(range(len(holder)) if isinstance(holder, list) else sorted(holder))
            inner = holder[key]
            if not (isinstance(inner, list | dict) and inner) or self._random.random() < 0.08:
                break
            holder = inner
        holder[key] = self._other(inner)
        return msgspec.msgpack.encode(value)

    def _other(self, value: Any) -> Any:
        way = self._random.randrange(6)
        if way == 0 and isinstance(value, list):
            return value * self._random.choice([2, 3, 50])
        if way == 1 and isinstance(value, list) and value:
            return value[: self._random.randrange(len(value))]
        if way == 2:
            return self._deep(self._random.choice([10, 300]))
        if way == 3 and isinstance(value, int):
            return value ^ 1 << self._random.randrange(63)
        return self._random.choice(NUMBERS if way < 5 else OTHERS)

    def _deep(self, depth: int) -> Any:
        value: Any = self._random.choice(OTHERS)
        for _ in range(depth):
            value = [value] if self._random.random() < 0.5 else {"a": value}
        return value


def broken(payloads: Sequence[bytes], random: Random) -> bytes:
    """Return a message with bits turned, cut, spliced into another, or with something put in."""
    data = bytearray(random.choice(payloads))
    at = random.randrange(len(data))
    way = random.randrange(5)
    if way < 2:
        for _ in range(random.choice([1, 1, 2, 8])):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif way == 2:
        del data[at:]
    elif way == 3:
        other = random.choice(payloads)
        data[at:] = other[random.randrange(len(other)) :]
    else:
        data[at:at] = random.choice([b"\xff\xff\xff\xff\x0f", b"\x2a\x00", b"\x0b" * 200, random.randbytes(9)])
    return bytes(data)
