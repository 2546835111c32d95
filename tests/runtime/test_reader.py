"""Opening GGUF files: what gguf's reader sees, and damaged files."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge
from bridge.errors import BridgeError
from bridge.gguf_file import header
from bridge.gguf_file.header import read_header
from tests.conftest import CHECKPOINT
from tests.support.described import describe

PLACE = Path("x.gguf")


def write(path: Path, pairs: int = 3, **shards: int) -> Path:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list([f"token {i} é" for i in range(50)])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("empty-after-all", [0.5, -1.5])
    writer.add_bool("flag", True)
    writer.add_float64("double", 0.1)
    writer.add_uint64("large", 1 << 60)
    for key, value in shards.items():
        writer.add_uint16(f"split.{key}", value)
    writer.add_tensor("float", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("half", rng.standard_normal((2, 3, 32)).astype(np.float16))
    q8 = gguf.quants.quantize(rng.standard_normal((7, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q8", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", np.arange(9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def content(file: Path) -> bytes:
    return file.read_bytes()


def test_metadata_and_tensors_are_those_of_gguf(file):
    peer = gguf.GGUFReader(str(file))
    with bridge.open_gguf(file) as ours:
        expected = {k: f.contents() for k, f in peer.fields.items() if not k.startswith("GGUF.")}
        assert dict(ours.metadata) == expected
        assert ours.arch == "llama"
        assert list(ours.tensors) == [t.name for t in peer.tensors]
        for theirs in peer.tensors:
            tensor = ours[theirs.name]
            assert tensor.type == theirs.tensor_type.name
            assert tensor.shape == tuple(int(n) for n in reversed(theirs.shape))
            assert tensor.raw.tobytes() == np.ascontiguousarray(theirs.data).tobytes()
            np.testing.assert_array_equal(
                tensor.dequantize(), gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(tensor.shape)
            )


def rotated(path: Path, **keys: int | str) -> Path:
    """A GGUF that declares its weights to be in a rotated basis."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"prism.hadamard.{key}"
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((3, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_in_a_rotated_basis_are_refused_by_all_that_would_use_them(tmp_path: Path) -> None:
    """PrismML's keys: without the transform such weights give nothing of use, and no key but these says so."""
    path = rotated(tmp_path / "x.gguf", version=1, block_size=256, sign_mode="identity")
    said = r"x.gguf: its metadata has prism.hadamard.version and 2 more: .* a rotated basis, .* is not implemented here"
    users = (
        bridge.open_gguf, bridge.Model.load, lambda path: bridge.convert(path, tmp_path / "y.gguf"),
        lambda path: bridge.export(path, tmp_path / "y"), lambda path: bridge.verify(path, CHECKPOINT),
        lambda path: bridge.edit(path, in_place=True, remove=["prism.hadamard.version"]),
    )  # fmt: skip
    for use in users:
        with pytest.raises(BridgeError, match=said):
            use(path)
    assert path.exists()
    assert not [*tmp_path.glob("y*")]
    assert "note: prism.hadamard.version declares weights in a rotated basis" in describe(path)


def test_a_file_is_a_mapping_of_names_to_tensors(file):
    with bridge.open_gguf(file) as opened:
        names = ["float", "half", "q8", "vector"]
        assert isinstance(opened, Mapping)
        assert list(opened) == list(opened.keys()) == names
        assert len(opened) == 4
        assert [tensor.name for tensor in opened.values()] == names
        assert dict(opened.items()) == opened.tensors
        assert "q8" in opened
        assert "other" not in opened
        assert opened.get("q8") is opened["q8"]
        assert opened.get("other") is None
        with pytest.raises(BridgeError, match=r"small\.gguf: no tensor other; it has 4 others$") as error:
            opened["other"]
        with pytest.raises(BridgeError, match=r"small\.gguf: no tensor flaot; did you mean float\?$"):
            opened["flaot"]
        assert isinstance(error.value, KeyError)
        assert str(error.value).startswith(str(file))
        assert opened == opened
        with bridge.open_gguf(file) as again:
            assert len({opened, again}) == 2
    assert list(opened) == []


def test_metadata_is_decoded_on_first_use(file):
    opened = bridge.open_gguf(file)
    assert "tokenizer.ggml.tokens" in opened.metadata
    assert opened.metadata._values == {}
    assert len(opened.metadata["tokenizer.ggml.tokens"]) == 50
    opened.close()
    assert opened.metadata["double"] == 0.1  # also after closing


def test_tensors_outlive_their_file(file):
    with bridge.open_gguf(file) as opened:
        tensor = opened["q8"]
    x = np.ones(64, np.float32)
    np.testing.assert_allclose(tensor.matvec(x), tensor.dequantize() @ x, atol=0.05)


def test_shards_are_read_together(tmp_path):
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama", split_max_tensors=2)
    arrays = {f"t{i}": np.full((2, 4), i, np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    for first in files:
        opened = bridge.open_gguf(first)
        assert {name: t.dequantize()[0, 0] for name, t in opened.tensors.items()} == {f"t{i}": i for i in range(5)}
    files[1].unlink()
    with pytest.raises(BridgeError, match="this shard is missing"):
        bridge.open_gguf(files[0])


def refuse(data: bytes, match: str) -> None:
    with pytest.raises(BridgeError, match=match):
        read_header(data, PLACE)


def test_files_that_are_no_gguf(tmp_path, content):
    with pytest.raises(BridgeError, match="no such file"):
        bridge.open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(BridgeError, match=str(tmp_path)):
        bridge.open_gguf(tmp_path)
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(BridgeError, match="not a GGUF"):
        bridge.open_gguf(tmp_path / "empty.gguf")
    refuse(b"PK\3\4" + content[4:], "not a GGUF file")
    refuse(content[:4] + struct.pack("<I", 1) + content[8:], "version 1")
    refuse(content[:4] + struct.pack("<I", 99) + content[8:], "version 99")
    refuse(content[:4] + struct.pack(">I", 3) + content[8:], "big-endian")


def test_counts_beyond_the_file_take_no_memory(content):
    tracemalloc.start()
    for at in (8, 16):
        refuse(content[:at] + struct.pack("<Q", 1 << 60) + content[at + 8 :], "do not fit")
    tokens = content.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for count in (1 << 60, 1 << 30, len(content), 60):
        refuse(content[:tokens] + struct.pack("<Q", count) + content[tokens + 8 :], "damaged")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_any_truncation_is_noticed(content):
    for length in [*range(4, 1500, 7), len(content) - 64, len(content) - 32]:
        refuse(content[:length], "damaged or truncated")


def entry(content: bytes, name: bytes) -> int:
    """Where a tensor's number of dimensions is."""
    return content.rindex(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def test_tensors_that_contradict_themselves(content):
    at = entry(content, b"q8")
    dimensions, columns, rows, kind, offset = struct.unpack_from("<IQQIQ", content, at)
    assert (dimensions, columns, rows, kind) == (2, 64, 7, 8)

    def changed(*fields: int) -> bytes:
        return content[:at] + struct.pack("<IQQIQ", *fields) + content[at + 32 :]

    read_header(changed(2, 64, 7, 8, offset), PLACE)
    refuse(changed(2, 64, 700000, 8, offset), "q8 .*ends at byte")
    refuse(changed(2, 64, 7, 8, offset + (1 << 40)), "q8 .*ends at byte")
    refuse(changed(2, 64, 7, 8, offset + 1), "not a multiple of 32")
    refuse(changed(2, 64, 8, 8, offset), "damaged: q8 .*vector starts")
    refuse(changed(2, 64, 7, 0, offset), "damaged or truncated: q8")
    refuse(changed(2, 48, 7, 8, offset), "not whole Q8_0 blocks")
    refuse(changed(2, 0, 7, 8, offset), "impossible shape")
    refuse(changed(2, 1 << 40, 1 << 40, 8, offset), "impossible shape")
    refuse(changed(2, 64, 7, 4, offset), "type 4")
    refuse(changed(2, 64, 7, 9999, offset), "type 9999")
    refuse(changed(9, 64, 7, 8, offset), "9 dimensions")


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_headers_are_refused_or_read_within_bounds(content, data):
    header = content.index(b"vector") + 64
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(st.one_of(st.integers(0, 300), st.integers(0, 2 ** (8 * width) - 1)))
        changed[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
    if data.draw(st.booleans()):
        del changed[data.draw(st.integers(24, len(changed))) :]
    try:
        metadata, tensors = read_header(bytes(changed), PLACE)
        metadata.load()
    except BridgeError:
        return
    for info in tensors:
        assert info.start >= 0
        assert info.start + info.nbytes <= len(changed)


def header_with(*arrays: bytes) -> bytes:
    """A GGUF without tensors: the values of the keys "0", "1" ..., from their types on."""
    pairs = b"".join(packed(str(number).encode()) + array for number, array in enumerate(arrays))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(arrays)) + pairs


def packed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def string_array(texts: list[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(packed, texts))


@settings(max_examples=200, deadline=None)
@given(
    arrays=st.lists(
        st.lists(
            st.one_of(
                st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
                st.sampled_from(["", "\0", "a\0b", 7 * "\0", 255 * "a", 256 * "a", 65536 * "\u00e9", "\U0001f642"]),
            ),
            max_size=20,
        ),
        max_size=3,
    ),
    window=st.sampled_from([50, 97, header._WINDOW]),
)
def test_arrays_of_strings_are_read_as_they_were_written(arrays: list[list[str]], window: int) -> None:
    data = header_with(*(string_array([text.encode() for text in texts]) for texts in arrays))
    with mock.patch.object(header, "_WINDOW", window):
        metadata, _ = read_header(data, PLACE)
    raw = [metadata.raw(key) for key in metadata]
    assert list(metadata.values()) == arrays
    assert [metadata.raw(key) for key in metadata] == raw


def test_arrays_of_arrays_of_strings_are_read() -> None:
    inner = [string_array([b"a", b"bc"])[4:], string_array([])[4:]]
    metadata, _ = read_header(header_with(struct.pack("<IIQ", 9, 9, 2) + b"".join(inner)), PLACE)
    assert metadata["0"] == [["a", "bc"], []]


def test_a_string_of_an_array_that_is_not_utf_8_is_named_by_its_place() -> None:
    data = header_with(string_array([b"one", b"tw\xff", b"three"]))
    metadata, _ = read_header(data, PLACE)
    with pytest.raises(
        BridgeError, match=f"the string at byte {data.index(packed(b'tw' + bytes([255])))} is not UTF-8"
    ):
        metadata["0"]
    for halves in ([b"\xc3", b"\xa9"], [b"\xe2\x82", b"\xac"]):  # together they would be
        metadata, _ = read_header(header_with(string_array(halves)), PLACE)
        with pytest.raises(BridgeError, match="is not UTF-8"):
            metadata["0"]


def test_an_array_of_strings_that_does_not_end_is_refused() -> None:
    data = header_with(string_array([b"one", b"two"]))
    for length in (4, 1000, 1 << 62, (1 << 64) - 1):
        refuse(data.replace(packed(b"two"), struct.pack("<Q", length) + b"two"), "does not end in the file")


def test_importing_and_opening_take_neither_torch_nor_numba(file):
    code = (
        "import sys, bridge\n"
        f"f = bridge.open_gguf({str(file)!r})\n"
        "f['float'].dequantize(), f['q8'].raw[:3], f.metadata['flag']\n"
        "import numpy as np\n"
        "f['q8'].matvec(np.ones(64, np.float32))\n"
        "assert 'torch' not in sys.modules\n"
    ).replace("import numpy", "assert not {'numba', 'llvmlite'} & set(sys.modules)\nimport numpy")
    subprocess.run([sys.executable, "-c", code], check=True)
