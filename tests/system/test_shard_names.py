"""Names of files that are one of several."""

from bridge.system.files import shard_name, shard_of, without_shard


def test_a_shards_name_in_parts_and_made_again():
    name = "model-Q4_K-00002-of-00003.gguf"
    assert shard_of(name) == ("model-Q4_K", 3, ".gguf")
    assert shard_name("model-Q4_K", 2, 3, ".gguf") == name
    assert [shard_of(other) for other in ("model.gguf", "a-2-of-3.gguf", "a-00001-of-00003")] == 3 * [None]


def test_the_name_that_all_shards_share():
    names = ("m-00001-of-00002.gguf", "m-00001-of-00002", "m.safetensors", "m-00001-of-00002x.gguf")
    assert [without_shard(name) for name in names] == ["m.gguf", "m", *names[2:]]
