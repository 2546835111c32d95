"""Conversations as tokens, by the chat template of a GGUF."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.runtime.tokenizer import Tokenizer


class ChatTemplate:
    """A file's own templates: one for conversations, and perhaps one for those with tools."""

    def __init__(self, metadata: Mapping[str, Any], path: Path):
        self._path = path
        plain, for_tools = (metadata.get(f"tokenizer.chat_template{kind}") for kind in ("", ".tool_use"))
        self.text: str | None = plain if isinstance(plain, str) else None  # in jinja
        self._for_tools = for_tools if isinstance(for_tools, str) else None

    @property
    def takes_tools(self) -> bool:
        """Whether it has a place for tools."""
        return self._for_tools is not None or "tools" in (self.text or "")

    def tokens(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any] | None,
        most: int | None,
    ) -> list[int]:
        """See `Model.chat_tokens`."""
        from bridge.gguf_file.chat_template import TemplateFailed, check_template_options, render_chats

        plain = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
        if not plain or not all(isinstance(message, Mapping) for message in messages):
            raise BridgeError('the messages of a chat must be a list: [{"role": "user", "content": "..."}, ...]')
        extra = check_template_options({} if options is None else options)
        template = self._for_tools if extra.get("tools") and self._for_tools else self.text
        if template is None:
            raise BridgeError(
                f"{self._path}: the file has no chat template; give the whole prompt as a text, to `gguf-bridge run "
                "-p` without --chat or to Model.generate"
            )
        bos, eos = tokenizer.text(tokenizer.bos), tokenizer.text(tokenizer.eos)
        (text,) = render_chats(template, [(messages, True)], {"bos_token": bos, "eos_token": eos}, options=extra)
        if isinstance(text, TemplateFailed):
            raise BridgeError(f"{self._path}: the chat template cannot be used: {text}") from text
        special = not (bos and text.startswith(bos))
        return tokenizer.encode(text, special) if most is None else tokenizer.encode_within(text, most, special)
