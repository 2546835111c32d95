"""How a model's replies in chats are written, by its chat template and its vocabulary."""

from collections.abc import Sequence

from bridge.gguf_file.special_tokens import CONTROL
from bridge.runtime.chat.formats import HARMONY, CallFormat, thinking_marks
from bridge.runtime.chat.grammar import ReplyGrammar
from bridge.runtime.chat.parser import HarmonyParser, MarkedParser, ReplyParser
from bridge.runtime.chat.reading import Functions
from bridge.runtime.tokenizer import Tokenizer

_TAIL = 16  # tokens at the end of a prompt that the marks of what a model thinks are looked for in


class ReplyForm:
    """
    template  in jinja, "" for none
    calls     how calls of tools are written
    """

    def __init__(self, template: str, calls: CallFormat, tokenizer: Tokenizer):
        self.calls = calls
        self._tokenizer = tokenizer
        self._marks = thinking_marks(template)
        self._may_think = self._marks.end in template
        control = [(tokenizer.tokens[token], token) for token, kind in enumerate(tokenizer.types) if kind == CONTROL]
        self._mark_tokens = _part_of(control, [self._marks.begin, self._marks.end])
        self._call_tokens = _part_of(control, calls.literals)
        self._others = {token for _, token in control} - tokenizer.stops

    @property
    def thinks(self) -> bool:
        """Whether the template knows what the model thinks before it answers."""
        return self._may_think or self.calls is HARMONY

    def shown(self, tools: bool) -> frozenset[int]:
        """The control tokens whose text a parser needs."""
        tokens = self._mark_tokens | (self._call_tokens if tools else {})
        return frozenset(tokens.values()) - self._tokenizer.stops

    def parser(self, prompt: Sequence[int], functions: Functions | None) -> ReplyParser:
        """What takes a reply to a prompt apart; `functions`: what it may call, None: what may be calls is content."""
        if self.calls is HARMONY:
            return HarmonyParser(functions is not None)
        return MarkedParser(
            self._marks, self._has_begun(self._tail(prompt)), None if functions is None else self.calls, functions or {}
        )

    @property
    def has_begin(self) -> bool:
        """Whether a call can be told by its begin from any other text, and what follows is one."""
        return bool(self.calls.begin) and self.calls is not HARMONY

    def grammar(
        self, prompt: Sequence[int], rule: str, functions: Functions | None, several: bool, free: bool = False
    ) -> str:
        """The grammar of a reply to a prompt, see `ReplyGrammar.text`."""
        tail = self._tail(prompt)
        thinks = self._has_begun(tail)
        may_think = thinks or (self._may_think and not tail.endswith(self._marks.end))
        marks = self._marks if may_think else None
        tokens = self._mark_tokens | self._call_tokens
        grammar = ReplyGrammar(tokens, self._others, marks, thinks, self.calls is HARMONY)
        return grammar.text(rule, self.calls, functions, several, free)

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt[-_TAIL:], special=True).rstrip()

    def _has_begun(self, tail: str) -> bool:
        """Whether a prompt that ends so has begun what the model thinks."""
        return tail.endswith(self._marks.begin.rstrip())


def _part_of(control: Sequence[tuple[str, int]], literals: Sequence[str]) -> dict[str, int]:
    """The control tokens, by their texts, that texts consist of."""
    return {text: token for text, token in control if len(text) > 1 and any(text in literal for literal in literals)}
