"""Importance matrices in llama.cpp's GGUF form."""

from __future__ import annotations

import re
import struct
import tracemalloc
from typing import Any

import gguf
import numpy as np
import pytest

from bridge.errors import BridgeError
from bridge.gguf_file.imatrix import for_tensor, read_imatrix


def write(path, tensors: dict[str, Any], kind: str = "imatrix", dtype: Any = np.float32):
    writer = gguf.GGUFWriter(path, arch="llama")
    writer.add_type(kind)
    for name, value in tensors.items():
        writer.add_tensor(name, np.asarray(value, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_importance_is_the_mean_square_of_each_column(tmp_path):
    path = write(
        tmp_path / "i.gguf",
        {"blk.0.ffn_down.weight.in_sum2": [[2, 4, 6, 8]], "blk.0.ffn_down.weight.counts": [[2]]},
    )
    found = read_imatrix(path)
    assert list(found) == ["blk.0.ffn_down.weight"]
    assert found["blk.0.ffn_down.weight"].tolist() == [1, 2, 3, 4]
    assert for_tensor(found, "blk.0.ffn_down.weight", 4) is found["blk.0.ffn_down.weight"]
    assert for_tensor(found, "token_embd.weight", 4) is None


def test_experts_have_a_row_each_and_an_unused_one_gets_ones(tmp_path):
    path = write(tmp_path / "i.gguf", {"e.in_sum2": [[2, 4], [7, 7], [3, 9]], "e.counts": [[2], [0], [3]]})
    found = read_imatrix(path)
    assert found["e"].tolist() == [[1, 2], [1, 1], [1, 3]]
    assert for_tensor(found, "e", 2, experts=3) is not None


def test_an_imatrix_of_another_model_is_refused(tmp_path):
    found = read_imatrix(write(tmp_path / "i.gguf", {"t.in_sum2": [[1, 1]], "t.counts": [[1]]}))
    with pytest.raises(BridgeError, match="make it with this model"):
        for_tensor(found, "t", 4)
    with pytest.raises(BridgeError, match="make it with this model"):
        for_tensor(found, "t", 2, experts=8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1])
def test_values_that_are_no_mean_squares_are_refused(tmp_path, bad):
    path = write(tmp_path / "i.gguf", {"t.in_sum2": [[1, bad]], "t.counts": [[1]]})
    with pytest.raises(BridgeError, match=r"t holds NaN"):
        read_imatrix(path)


def test_sums_without_counts_are_refused(tmp_path):
    with pytest.raises(BridgeError, match=r"no matching t\.counts"):
        read_imatrix(write(tmp_path / "i.gguf", {"t.in_sum2": [[1, 1]]}))
    with pytest.raises(BridgeError, match="2 counts"):
        read_imatrix(write(tmp_path / "j.gguf", {"t.in_sum2": [[1, 1]], "t.counts": [[1], [1]]}))


def test_sums_of_another_type_are_refused(tmp_path):
    path = write(tmp_path / "i.gguf", {"t.in_sum2": [[1, 1]], "t.counts": [[1]]}, dtype=np.float16)
    with pytest.raises(BridgeError, match=r"t\.(in_sum2|counts) is F16, must be F32"):
        read_imatrix(path)


def test_a_header_that_claims_more_than_the_file_holds_takes_no_memory(tmp_path):
    (tmp_path / "i.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + bytes(1000))
    tracemalloc.start()
    with pytest.raises(BridgeError, match=f"{1 << 60} tensors and 1 keys do not fit"):
        read_imatrix(tmp_path / "i.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_model_is_not_an_imatrix(tmp_path):
    with pytest.raises(BridgeError, match="not 'imatrix'"):
        read_imatrix(write(tmp_path / "m.gguf", {"t": [1, 1]}, kind="model"))


def old_format(entries: dict[str, tuple[int, Any]], end: bytes = struct.pack("<ii", 10, 5) + b"a.txt") -> bytes:
    """imatrix.dat: name -> calls, sums."""
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, sums) in entries.items():
        own = np.asarray(sums, "<f4")
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", calls, len(own)), own.tobytes()]
    return b"".join([*parts, end])


@pytest.mark.parametrize("end", [b"", struct.pack("<i", 10), struct.pack("<ii", 10, 5) + b"a.txt"])
@pytest.mark.parametrize("name", ["old.dat", "old.imatrix"])
def test_the_old_binary_format_is_read(tmp_path, name, end):
    (tmp_path / name).write_bytes(old_format({"t": (2, [2, 4, 6]), "u": (0, [5, 7]), "e": (2, [2, 4, 0, 0])}, end))
    found = read_imatrix(tmp_path / name)
    assert {key: values.tolist() for key, values in found.items()} == {"t": [1, 2, 3], "u": [5, 7], "e": [1, 2, 0, 0]}
    experts = for_tensor(found, "e", 2, experts=2)
    assert experts is not None
    assert experts.tolist() == [[1, 2], [1, 1]]  # of an expert that saw no token
    with pytest.raises(BridgeError, match="make it with this model"):
        for_tensor(found, "e", 2, experts=3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (old_format({"t": (2, [2, 4, 6])}, b"")[:-3], "entry 1 ends beyond the file's 26 bytes"),
        (old_format({"t": (2, [2, 4, 6])}, b"")[:10], "entry 1 ends beyond"),
        (struct.pack("<ii", 1, 1) + b"t" + struct.pack("<ii", 1, 1 << 30), "entry 1 ends beyond"),
        (struct.pack("<ii", 1, 1) + b"t" + struct.pack("<ii", 1, -1), "entry 1 ends beyond"),
        (struct.pack("<ii", 1, -5) + bytes(64), "has no name or no values"),
        (old_format({"t": (1, [])}), "has no name or no values"),
        (old_format({"t": (1, [1]), "u": (1, [np.nan])}), "entry 2, 'u', has no name or no values, or holds NaN"),
        (old_format({"t": (1, [-1])}), "or negative ones"),
        (old_format({"t": (-1, [1])}), "or negative ones"),
        (struct.pack("<i", 0), "an imatrix of no tensors"),
    ],
)
def test_a_damaged_file_of_the_old_format_is_named(tmp_path, data, said):
    (tmp_path / "old.dat").write_bytes(data)
    with pytest.raises(BridgeError, match=re.escape(said)):
        read_imatrix(tmp_path / "old.dat")


def test_files_that_are_missing_cut_short_or_something_else_are_refused(tmp_path):
    with pytest.raises(BridgeError, match="no such file"):
        read_imatrix(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello, world: not a model at all")
    with pytest.raises(BridgeError, match="not a GGUF"):
        read_imatrix(tmp_path / "text.gguf")
    whole = write(tmp_path / "i.gguf", {"t.in_sum2": np.ones((1, 64)), "t.counts": [[1]]}).read_bytes()
    for size in (4, 20, len(whole) // 2, len(whole) - 64):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(BridgeError, match=r"shorter than a header|damaged or truncated"):
            read_imatrix(tmp_path / "cut.gguf")
