"""Merges an adapter into what is converted: its experts where the checkpoint has them, and its tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.checkpoint import Checkpoint
from bridge.checkpoint.adapter import Adapter
from bridge.checkpoint.merge import merge
from bridge.conversion.adapter_experts import place_experts
from bridge.conversion.planning.checkpoint_outline import outline_of
from bridge.models.tokenizer.gguf_tokenizer import highest_token

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@contextmanager
def merged(ckpt: Checkpoint, adapter: Adapter | None, template: str | Path | None) -> Iterator[Path]:
    """Let a checkpoint read as its model with an adapter; its own folder of config and tokenizer.

    Meanwhile `ckpt.home` has the adapter's tokenizer, where that has more tokens. Raises BridgeError as `merge` does.
    """
    home, config = ckpt.home, ckpt.config
    if adapter is None:
        yield home
        return
    outline = outline_of(ckpt, "default", template)
    ckpt.config = config  # what the tensors contradict is put right when they are merged, with notes
    merge(ckpt, place_experts(adapter, outline.tensors))
    if not highest_token(adapter.path) > highest_token(home) > -1:
        yield home
        return
    with TemporaryDirectory() as scratch:
        ckpt.home = Path(scratch) / home.resolve().name
        ckpt.home.mkdir()
        for file in home.iterdir():
            if file.name not in _TOKENIZER:
                (ckpt.home / file.name).symlink_to(file.resolve())
        for file in (adapter.path / name for name in _TOKENIZER):
            if file.is_file():
                (ckpt.home / file.name).symlink_to(file.resolve())
        ckpt.notes.append(f"the tokenizer is that of the adapter {adapter.path.name}, which has more tokens")
        yield home
    ckpt.home = home
