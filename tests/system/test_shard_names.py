"""Names of files that are one of several."""

from bridge.system.storage.files import shards_of, without_shard


def test_the_names_of_all_shards():
    assert shards_of("m-Q4_K-00002-of-00002.gguf") == ["m-Q4_K-00001-of-00002.gguf", "m-Q4_K-00002-of-00002.gguf"]
    assert [shards_of(name) for name in ("m.gguf", "a-2-of-3.gguf", "a-00001-of-00003", "m-00001-of-00000.gguf")] == [
        [], [], [], []
    ]  # fmt: skip
    assert shards_of("m-00001-of-00001.x.gguf", r"\.gguf") == []


def test_the_name_that_all_shards_share():
    names = ("m-00001-of-00002.gguf", "m-00001-of-00002", "m.safetensors", "m-00001-of-00002x.gguf")
    assert [without_shard(name) for name in names] == ["m.gguf", "m", *names[2:]]
