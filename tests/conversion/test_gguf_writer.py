"""Writing a GGUF: nothing under the final name before it is whole, shards as llama.cpp has them."""

import errno
import os
from dataclasses import replace

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from bridge.conversion.planning.plan import Plan, PlannedTensor
from bridge.conversion.writing import gguf_writer as output
from bridge.conversion.writing.gguf_writer import GGUFOutput
from bridge.errors import BridgeError
from bridge.system.storage.outputs import ProtectedPaths
from tests.conftest import posix

TENSORS = [("a.weight", (4, 256), Type.Q4_K), ("b.weight", (8, 256), Type.Q8_0), ("norm.weight", (256,), Type.F32)]


def plan(split_max_size=None):
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_name("test")
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(100)])
    tensors = [PlannedTensor(name, shape, type=type_.name) for name, shape, type_ in TENSORS]
    return Plan(writer.kv_data[0], tensors, split_max_size=split_max_size)


def data(rng):
    return {
        "a.weight": (Type.Q4_K, rng.integers(0, 255, (4, 144)).astype(np.uint8)),
        "b.weight": (Type.Q8_0, rng.integers(0, 255, (8, 8 * 34)).astype(np.uint8)),
        "norm.weight": (Type.F32, rng.standard_normal(256).astype(np.float32)),
    }


def write(path, payload, split_max_size=None, **options):
    with GGUFOutput(path, plan(split_max_size), **options) as output:
        for tensor in output.tensors:
            if tensor.name in payload:
                output.write(payload[tensor.name][1])
        return output.finish()


def read_all(files):
    tensors = {}
    for file in files:
        tensors.update((t.name, t) for t in gguf.GGUFReader(file).tensors)
    return tensors


def test_a_file_holds_the_plans_keys_and_tensors(tmp_path):
    payload = data(np.random.default_rng(0))
    files = write(tmp_path / "m.gguf", payload)
    assert files == [tmp_path / "m.gguf"]
    reader = gguf.GGUFReader(files[0])
    assert reader.fields["general.name"].contents() == "test"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 100
    for tensor in reader.tensors:
        qtype, array = payload[tensor.name]
        assert tensor.tensor_type == qtype
        np.testing.assert_array_equal(np.asarray(tensor.data).view(np.uint8).ravel(), array.view(np.uint8).ravel())
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_an_existing_file_is_kept_without_force_and_replaced_with_it(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    payload = data(np.random.default_rng(0))
    with pytest.raises(BridgeError, match=r"m\.gguf: exists; force=True"):
        write(path, payload)
    assert path.read_bytes() == b"old"
    write(path, payload, force=True)
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("split", [None, 2000])
@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(tmp_path, split, failure):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    payload = data(np.random.default_rng(0))

    def fail():
        with GGUFOutput(path, plan(split), force=True) as output:
            output.write(payload["a.weight"][1])
            raise failure

    with pytest.raises(failure):
        fail()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_write_that_fails_names_the_file_and_the_tensor(tmp_path):
    class FullDisk(np.ndarray):
        def tofile(self, *_):
            raise OSError(28, "No space left on device")

    path = tmp_path / "m.gguf"
    _, array = data(np.random.default_rng(0))["a.weight"]
    with (
        pytest.raises(BridgeError, match=r"m\.gguf: writing a\.weight failed \(No space left"),
        GGUFOutput(path, plan()) as output,
    ):
        output.write(array.view(FullDisk))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [0, 2])
def test_what_the_disk_refuses_behind_our_back_is_an_error_and_leaves_nothing(tmp_path, monkeypatch, at):
    def refuse(_file):
        raise OSError(errno.EIO, "Input/output error")

    payload = data(np.random.default_rng(0))
    largest = sum(array.nbytes for _, array in payload.values())
    monkeypatch.setattr(output, "_SYNC_BYTES", 1 if at == 0 else largest)  # the first sync after that many bytes
    monkeypatch.setattr(output, "_sync_data", refuse)
    with pytest.raises(BridgeError, match=r"m\.gguf: writing .* failed \(Input/output error"):
        write(tmp_path / "m.gguf", payload)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_noticed_before_the_file_appears(tmp_path):
    payload = data(np.random.default_rng(0))
    del payload["norm.weight"]
    with pytest.raises(BridgeError, match=r"1 of 3 tensors is missing, norm\.weight first"):
        write(tmp_path / "m.gguf", payload)
    assert not list(tmp_path.iterdir())


def test_shards_have_llama_cpps_names_and_metadata(tmp_path):
    payload = data(np.random.default_rng(0))
    files = write(tmp_path / "m.gguf", payload, split_max_size=3300)
    assert [f.name for f in files] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [f.name for f in files]
    for i, file in enumerate(files):
        fields = gguf.GGUFReader(file).fields
        assert fields["split.no"].contents() == i
        assert fields["split.count"].contents() == 2
        assert fields["split.tensors.count"].contents() == 3
    tensors = read_all(files)
    assert set(tensors) == set(payload)
    assert tensors["a.weight"].tensor_type == Type.Q4_K


def test_scales_follow_their_tensor_and_move_no_boundary():
    """A plan has no scales of NVFP4 yet when it tells how many shards it makes."""
    alone = [PlannedTensor(f"blk.{i}.attn_q.weight", (4, 256), type="NVFP4") for i in range(6)]
    scales = [
        PlannedTensor(f"blk.{i}.attn_q.scale", (1,), data=np.ones(1, np.float32), origin="scale", type="F32")
        for i in range(6)
    ]
    both = [t for pair in zip(alone, scales, strict=True) for t in pair]
    limit = 2 * alone[0].nbytes  # reached by two tensors, passed by their scales
    before = [[t.name for t in shard] for shard in output.shards_of(replace(plan(limit), tensors=alone))]
    after = [[t.name for t in shard] for shard in output.shards_of(replace(plan(limit), tensors=both))]
    assert [len(shard) for shard in before] == [2, 2, 2]
    assert after == [[x for name in shard for x in (name, name.replace("weight", "scale"))] for shard in before]


def test_shards_are_not_written_over_without_force(tmp_path):
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"old")
    with pytest.raises(BridgeError, match="exists; force=True"):
        write(tmp_path / "m.gguf", data(np.random.default_rng(0)), split_max_size=3300)
    assert (tmp_path / "m-00001-of-00002.gguf").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("split", [None, 3300])
def test_a_file_that_is_read_is_not_replaced_even_with_force(tmp_path, split):
    name = "m-00001-of-00002.gguf" if split else "m.gguf"
    (tmp_path / "weights").write_bytes(b"weights")
    os.link(tmp_path / "weights", tmp_path / name)
    with pytest.raises(BridgeError, match=f"{name}: this run reads or writes that file already"):
        write(
            tmp_path / "m.gguf",
            data(np.random.default_rng(0)),
            force=True,
            split_max_size=split,
            protected=ProtectedPaths((tmp_path / "weights",)),
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == [name, "weights"]
    assert (tmp_path / name).read_bytes() == b"weights"


@pytest.mark.parametrize("target", ["nowhere", "weights", os.devnull])
@pytest.mark.parametrize("force", [False, True])
def test_a_link_is_neither_followed_nor_replaced(tmp_path, target, force):
    path = tmp_path / "m.gguf"
    (tmp_path / "weights").write_bytes(b"weights")
    path.symlink_to(target)
    with pytest.raises(BridgeError, match=rf"m\.gguf: is a link to {target}"):
        write(path, data(np.random.default_rng(0)), force=force)
    assert os.readlink(path) == target
    assert (tmp_path / "weights").read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "weights"]


@posix
def test_a_pipe_is_never_replaced(tmp_path):
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    with pytest.raises(BridgeError, match="is a device or a pipe"):
        write(path, data(np.random.default_rng(0)), force=True)
    assert path.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_model_smaller_than_a_shard_is_one_file(tmp_path):
    files = write(tmp_path / "m.gguf", data(np.random.default_rng(0)), split_max_size=10**9)
    assert [f.name for f in files] == ["m.gguf"]


def test_an_output_that_cannot_be_made_is_refused_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BridgeError, match="file: is not a folder; give another output"):
        GGUFOutput(tmp_path / "file" / "below" / "m.gguf", plan())
    with pytest.raises(BridgeError, match="is a folder"):
        GGUFOutput(tmp_path, plan())
