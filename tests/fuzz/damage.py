"""Ways to damage a stream: bits, bytes, numbers and lengths in a message; missing, repeated, moved or foreign
messages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

Messages = list[bytes]

_HEADER_BYTES = 25
_TELLING = b'\x00\x01\x02\x7f\x80\xfe\xffntubNKOBCRYIUDTMSEcAwkdfi -0.\\"{'
_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_KINDS = b"BCORYIUDTMSEcA"
_SIZES = ((2, "!H"), (4, "!I"), (4, "!I"), (8, "!Q"))


def damage(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    """Do one thing to the messages, in place."""
    if not messages:
        messages.append(random.choice(donors))
    elif random.random() < 0.7:
        at = int(random.random() * len(messages))
        way = _WITHIN[int(random.random() * len(_WITHIN))]
        messages[at] = way(random, messages[at], donors)
    else:
        _AMONG[int(random.random() * len(_AMONG))](random, messages, donors)


# --- within a message ---------------------------------------------------------------------------------------


def _place(random: Random, message: bytes) -> int:
    """Rarely in the header, which holds little of importance."""
    if len(message) > _HEADER_BYTES and random.random() < 0.95:
        return _HEADER_BYTES + int(random.random() * (len(message) - _HEADER_BYTES))
    return int(random.random() * max(1, len(message)))


def _flip(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    at = _place(random, message)
    return (
        message[:at]
        + bytes([byte ^ 1 << int(random.random() * 8) for byte in message[at : at + 1]])
        + message[at + 1 :]
    )


def _replace(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    at = _place(random, message)
    return message[:at] + bytes([int(random.random() * 256)]) + message[at + 1 :]


def _tell(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    at = _place(random, message)
    return message[:at] + bytes([_TELLING[int(random.random() * len(_TELLING))]]) + message[at + 1 :]


def _number(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    """Overwrite a field, or a possible field, with an extreme number."""
    size, layout = random.choice(_SIZES)
    at = _place(random, message)
    return (
        message[:at]
        + struct.pack(layout, random.choice(_NUMBERS) & (1 << 8 * size) - 1)
        + message[at + size :]
    )


def _nudge(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    """A count or a length that is off by a little."""
    size, layout = random.choice(_SIZES)
    at = _place(random, message)
    field = message[at : at + size]
    number = int.from_bytes(field, "big") + random.choice([-2, -1, 1, 2, 256])
    return message[:at] + struct.pack(layout, number % (1 << 8 * size))[: len(field)] + message[at + size :]


def _length(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    """The length of a value, if there is one."""
    at = message.find(b"t\0\0", _place(random, message))
    if at < 0:
        return _nudge(random, message, donors)
    length = random.choice(
        [
            0,
            1,
            len(message) - at - 5,
            len(message) - at - 4,
            len(message) - at - 6,
            0x7FFFFFFF,
            0x80000000,
            0xFFFFFFFF,
        ]
    )
    return message[: at + 1] + struct.pack("!I", length & 0xFFFFFFFF) + message[at + 5 :]


def _shorten(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    return message[: _place(random, message)]


def _extend(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    return message + random.randbytes(1 + int(random.random() * 8))


def _insert(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    at = _place(random, message)
    return message[:at] + random.randbytes(1 + int(random.random() * 4)) + message[at:]


def _cut_out(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    at = _place(random, message)
    return message[:at] + message[at + 1 + int(random.random() * 6) :]


def _copy_over(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    """A part of the message written over another."""
    source, at, size = _place(random, message), _place(random, message), 1 + int(random.random() * 12)
    return message[:at] + message[source : source + size] + message[at + size :]


def _cross(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    """The beginning of this message, the end of another."""
    other = donors[int(random.random() * len(donors))]
    at = _place(random, message)
    return message[:at] + other[at if random.random() < 0.5 else _place(random, other) :]


def _change_kind(random: Random, message: bytes, donors: Sequence[bytes]) -> bytes:
    return (
        message[:_HEADER_BYTES]
        + _KINDS[(at := int(random.random() * len(_KINDS))) : at + 1]
        + message[_HEADER_BYTES + 1 :]
    )


_WITHIN: Sequence[Callable[[Random, bytes, Sequence[bytes]], bytes]] = (
    *(_flip, _replace, _tell, _tell, _number, _nudge, _nudge, _length, _length),
    *(_shorten, _extend, _insert, _cut_out, _copy_over, _cross, _change_kind),
)


# --- among messages -----------------------------------------------------------------------------------------


def _drop(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    del messages[int(random.random() * len(messages))]


def _double(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    at = int(random.random() * len(messages))
    messages.insert(at, messages[at])


def _move(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    moved = messages.pop(int(random.random() * len(messages)))
    messages.insert(int(random.random() * (len(messages) + 1)), moved)


def _swap(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    first, second = int(random.random() * len(messages)), int(random.random() * len(messages))
    messages[first], messages[second] = messages[second], messages[first]


def _splice(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    """Consecutive messages of another stream."""
    source, size = int(random.random() * len(donors)), 1 + int(random.random() * 4)
    at = int(random.random() * (len(messages) + 1))
    messages[at:at] = donors[source : source + size]


def _exchange(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    messages[int(random.random() * len(messages))] = donors[int(random.random() * len(donors))]


def _invent(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    """A message of random bytes, with or without a header and a kind."""
    body = random.randbytes(int(random.random() * 40))
    head = random.choice([b"", b"w" + bytes(24), b"w" + bytes(24) + bytes([random.choice(_KINDS)])])
    messages.insert(int(random.random() * (len(messages) + 1)), head + body)


def _repeat_stretch(random: Random, messages: Messages, donors: Sequence[bytes]) -> None:
    low = int(random.random() * len(messages))
    stretch = messages[low : low + 1 + int(random.random() * 5)]
    at = int(random.random() * (len(messages) + 1))
    messages[at:at] = stretch


_AMONG: Sequence[Callable[[Random, Messages, Sequence[bytes]], None]] = (
    *(_drop, _double, _move, _swap, _splice, _splice, _exchange, _invent, _repeat_stretch),
)
