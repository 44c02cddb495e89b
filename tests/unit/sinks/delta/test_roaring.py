"""Deletion vectors byte by byte: Roaring bitmaps against the format's description, and their files and inline
texts.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrow import distinct
from penstock.errors import SinkError, TargetFileLostError
from penstock.sinks.delta.deletion_vectors import (
    DeletionVector,
    _z85_decode,
    decode_positions,
    encode_positions,
    load_vector,
    write_vectors,
    z85_encode,
)

HEAD = struct.pack("<I", 1681511377)

EXAMPLE = "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
"""An example from the protocol's text. The format around the bitmap in that example is older than the one
that the text describes.
"""


def bitmap(*buckets: tuple[int, bytes]) -> bytes:
    return (
        HEAD
        + struct.pack("<Q", len(buckets))
        + b"".join(struct.pack("<I", key) + data for key, data in buckets)
    )


def test_the_example_of_the_protocol_is_read_and_written_to_the_byte() -> None:
    inner = _z85_decode(EXAMPLE)[12:]
    data = bitmap((0, inner))
    vector = DeletionVector("i", z85_encode(data), None, len(data), 6)
    assert load_vector(Path("/"), vector).tolist() == [3, 4, 7, 11, 18, 29]
    assert encode_positions(np.array([29, 3, 4, 7, 11, 18])) == data
    with pytest.raises(SinkError, match="portable"):
        load_vector(Path("/"), DeletionVector("i", EXAMPLE, None, 40, 6))


def test_a_name_of_the_protocol_leads_to_its_file(tmp_path: Path) -> None:
    vector = DeletionVector("u", "ab^-aqEH.-t@S}K{vb[*k^", 1, 0, 0)
    name = "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    (tmp_path / "ab").mkdir()
    empty = bitmap()
    (tmp_path / name).write_bytes(
        b"\x01" + struct.pack(">I", len(empty)) + empty + struct.pack(">I", zlib.crc32(empty))
    )
    assert load_vector(tmp_path, DeletionVector("u", vector.place, 1, len(empty), 0)).size == 0
    assert load_vector(tmp_path, DeletionVector("p", f"file://{tmp_path}/{name}", 1, len(empty), 0)).size == 0
    assert z85_encode(UUID("d2c639aa-8816-431a-aaf6-d3fe2512ff61").bytes) == "^-aqEH.-t@S}K{vb[*k^"


def test_runs_are_read_with_and_without_offsets() -> None:
    few = struct.pack("<I", 12347 | (1 << 16)) + bytes([0b01])  # two containers, the first of runs
    few += struct.pack("<HHHH", 0, 6, 2, 1)  # seven numbers under 0, two under 2
    few += struct.pack("<HHHHH", 2, 1, 4, 100, 1)  # 1 to 5, 100 to 101
    few += struct.pack("<HH", 7, 9)
    many = struct.pack("<I", 12347 | (3 << 16)) + bytes([0b1000])  # four containers, so there are offsets
    many += struct.pack("<8H", 0, 0, 1, 0, 2, 0, 3, 65535) + struct.pack("<4I", 0, 0, 0, 0)
    many += struct.pack("<HHH", 5, 6, 7) + struct.pack("<HHH", 1, 0, 65535)
    found = decode_positions(bitmap((0, few), (3, many)))
    low = [1, 2, 3, 4, 5, 100, 101, (2 << 16) + 7, (2 << 16) + 9]
    high = [(3 << 32) + each for each in (5, 65536 + 6, (2 << 16) + 7, *range(3 << 16, 4 << 16))]
    assert found.tolist() == low + high


def test_a_container_is_an_array_up_to_4096_numbers_and_a_bitmap_beyond() -> None:
    array, bits = np.arange(0, 8192, 2), np.arange(0, 8194, 2)
    head = 4 + 8 + 4 + 8 + 8
    assert [len(encode_positions(each)) - head for each in (array, bits)] == [2 * 4096, 8192]
    assert [decode_positions(encode_positions(each)).tolist() for each in (array, bits)] == [
        array.tolist(),
        bits.tolist(),
    ]


SETS = st.one_of(
    st.lists(st.integers(0, 2**40)),
    st.lists(st.integers(0, 1 << 18), max_size=2000),
    st.tuples(st.integers(0, 1 << 34), st.integers(0, 200_000), st.integers(1, 3)).map(
        lambda way: range(way[0], way[0] + way[1], way[2])
    ),
)


@settings(max_examples=60, deadline=None)
@given(SETS)
def test_any_set_of_rows_is_read_back_in_order_each_row_once(rows: list[int] | range) -> None:
    positions = np.array(rows, np.int64)
    assert np.array_equal(decode_positions(encode_positions(positions)), np.unique(positions))


@settings(max_examples=60, deadline=None)
@given(SETS)
def test_distinct_values_are_those_that_numpy_finds(rows: list[int] | range) -> None:
    assert np.array_equal(distinct(np.array(rows, np.int64)), np.unique(np.array(rows, np.int64)))


def test_row_numbers_that_ascend_are_neither_sorted_nor_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ascending = np.arange(0, 300_000, 3)
    assert distinct(ascending) is ascending
    for name in ("sort", "unique"):
        monkeypatch.setattr(np, name, lambda *_, **__: pytest.fail("row numbers that ascend need no sorting"))
    vector = write_vectors(tmp_path, [("file", ascending)])["file"]
    assert vector.count == ascending.size
    assert np.array_equal(load_vector(tmp_path, vector), ascending)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 17), max_size=50), st.data())
def test_damaged_bytes_are_refused_or_mean_a_set_and_never_crash(
    rows: list[int], data: st.DataObject
) -> None:
    whole = bytearray(encode_positions(np.array(rows, np.int64)))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(whole)))
    for bad in (bytes(whole), bytes(whole[:cut])):
        try:
            found = decode_positions(bad)
        except ValueError:
            continue
        assert np.array_equal(found, np.unique(found))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_z85_is_read_back_padded_to_four(data: bytes) -> None:
    assert _z85_decode(z85_encode(data)) == data + bytes(-len(data) % 4)


def test_z85_is_that_of_its_specification() -> None:
    assert z85_encode(bytes([0x86, 0x4F, 0xD2, 0x6F, 0xB5, 0x59, 0xF7, 0x5B])) == "HelloWorld"
    for bad in ("Hello Worl", "abc", "#####"):
        with pytest.raises(ValueError, match="Z85"):
            _z85_decode(bad)


def test_a_file_of_vectors_holds_each_with_its_checksum(tmp_path: Path) -> None:
    rows = {"a": np.array([1, 5]), "b": np.arange(100_000), "c": np.array([9])}
    vectors = write_vectors(tmp_path, rows.items())
    (file,) = tmp_path.iterdir()
    assert {path: load_vector(tmp_path, vector).tolist() for path, vector in vectors.items()} == {
        p: r.tolist() for p, r in rows.items()
    }
    assert len({vector.identity for vector in vectors.values()}) == 3
    assert DeletionVector.parse(vectors["b"].document()) == vectors["b"]

    data = bytearray(file.read_bytes())
    data[(vectors["b"].offset or 0) + 100] ^= 1
    file.write_bytes(data)
    assert load_vector(tmp_path, vectors["a"]).size == 2
    with pytest.raises(SinkError, match="damaged"):
        load_vector(tmp_path, vectors["b"])
    with pytest.raises(SinkError, match="the log says 7"):
        load_vector(
            tmp_path, DeletionVector("u", vectors["a"].place, vectors["a"].offset, vectors["a"].bytes, 7)
        )
    file.unlink()
    with pytest.raises(TargetFileLostError, match=r"\.bin of the target is missing"):
        load_vector(tmp_path, vectors["a"])


def test_no_vectors_leave_no_file(tmp_path: Path) -> None:
    assert write_vectors(tmp_path, []) == {}
    assert not list(tmp_path.iterdir())
