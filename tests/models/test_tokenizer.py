"""Vocabularies: token ids in llama.cpp must be those of the Hugging Face tokenizer."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, Keys, TokenType

from bridge.errors import BridgeError
from bridge.gguf_file.pretokenizers import byte_of
from bridge.models.config.model_config import Config
from bridge.models.tokenizer.gguf_tokenizer import read_chat_templates, read_tokenizer
from bridge.models.tokenizer.vocabulary import special_text
from scripts.peers.llama.llama_cpp import LlamaCpp
from tests.conftest import CHECKPOINT
from tests.support.tiny_vocab import vocab_gguf, vocabulary
from tests.support.tokenizers_by_hand import llama3, qwen

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "Hello world, it's 1234567 o'clock; don't you'll WE'LL",
    "  two  spaces\n\n\nthree lines\t\ttabs \r\n end  ",
    "def f(x):\n    return x[0] + 'a' if x != {} else None\n",
    "Ünïcödé naïve café, Ελληνικά, кириллица",
    "日本語のテキスト、中文文本 한국어 ไทย العربية",
    "🙂 emoji 👍🏽 and — dashes… “quotes” \u200b\u00a0",
    "The tower is 324 metres tall, about the same height as an 81-storey building (1889).",
    "",
    " ",
    "a",
]


def copy_tokenizer(style: str, folder: Path) -> dict[str, Any]:
    """A tokenizer of 2048 tokens in `folder`, as Qwen's or Llama 3's are; returns tokenizer.json."""
    data = llama3() if style == "llama" else qwen()
    bos = {"bos_token": "<|begin_of_text|>"} if style == "llama" else {}
    save(folder, data, eos_token="<|end_of_text|>" if style == "llama" else "<|endoftext|>", **bos)
    return data


def save(folder: Path, data: dict[str, Any], **settings: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(data))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | settings))


def spm_texts() -> list[str]:
    return [text.replace("\r", "") for text in TEXTS if text]


@pytest.mark.parametrize(("style", "special"), [("llama", "<|end_of_text|>"), ("qwen", "<|endoftext|>")])
def test_byte_level_tokens_are_those_of_the_tokenizer(style: str, special: str, tmp_path: Path) -> None:
    data = copy_tokenizer(style, tmp_path)
    _, path = vocab_gguf(tmp_path, len(data["model"]["vocab"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LlamaCpp(path) as loaded:
        for text in [*TEXTS, f"one{special}two {special}\n", special]:
            assert loaded.tokenize(text, add_special=True) == tokenizer(text)["input_ids"], text


def test_both_spellings_of_merges_give_the_same_file(tmp_path: Path) -> None:
    data = copy_tokenizer("qwen", tmp_path)
    pairs, _ = vocab_gguf(tmp_path, 2048)
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    save(tmp_path, data)
    strings, _ = vocab_gguf(tmp_path, 2048)
    assert vocabulary(pairs)["merges"] == vocabulary(strings)["merges"]
    assert vocabulary(pairs)["merges"] is not None
    assert vocabulary(pairs)["merges"][0] == "Ġ t"


def test_added_tokens_and_padding_fill_the_embedding(tmp_path: Path) -> None:
    data = copy_tokenizer("qwen", tmp_path)
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] += [
        {"id": 2048, "content": "<|im_end|>", "special": True, **added},
        {"id": 2049, "content": "<tool_call>", "special": False, **added},
    ]
    save(tmp_path, data, eos_token={"content": "<|im_end|>", "special": True})
    outline, path = vocab_gguf(tmp_path, 2052)
    made = vocabulary(outline)
    assert made["tokens"][2048:] == ["<|im_end|>", "<tool_call>", "[PAD2050]", "[PAD2051]"]
    assert made["token_type"][0] == made["token_type"][2048] == TokenType.CONTROL
    assert made["token_type"][2049] == TokenType.USER_DEFINED
    assert made["token_type"][2050] == made["token_type"][2051] == TokenType.UNUSED
    assert outline.stop == ["<|im_end|>"]
    reference = tokenizers.Tokenizer.from_str(json.dumps(data))
    with LlamaCpp(path) as loaded:
        for text in ("a<|im_end|>b", "call <tool_call>{} x"):
            assert loaded.tokenize(text) == reference.encode(text).ids
        assert loaded.eos == 2048


def test_tokens_beyond_the_embedding_are_left_out_and_reported(tmp_path: Path) -> None:
    copy_tokenizer("qwen", tmp_path)
    outline, _ = vocab_gguf(tmp_path, 2040)
    assert len(vocabulary(outline)["tokens"]) == 2040
    assert any("8 tokens have no row in the embedding of 2040 rows" in note for note in outline.notes)


def test_tokens_of_tokenizer_config_alone_are_added(tmp_path: Path) -> None:
    data = copy_tokenizer("qwen", tmp_path)
    save(tmp_path, data, added_tokens_decoder={"2048": {"content": "<|im_start|>", "special": True}})
    outline, _ = vocab_gguf(tmp_path, 2049)
    assert vocabulary(outline)["tokens"][2048] == "<|im_start|>"


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {
        "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [0], "tokens": ["<|begin_of_text|>"]},
        "<|end_of_text|>": {"id": "<|end_of_text|>", "ids": [1], "tokens": ["<|end_of_text|>"]},
    },
}
END = {"SpecialToken": {"id": "<|end_of_text|>", "type_id": 0}}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_bos_and_eos_are_added_where_the_post_processor_adds_them(nested: bool, eos: bool, tmp_path: Path) -> None:
    data = copy_tokenizer("llama", tmp_path)
    processor = TEMPLATE | {"single": [*TEMPLATE["single"], END] if eos else TEMPLATE["single"]}
    bytes_too = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    data["post_processor"] = {"type": "Sequence", "processors": [bytes_too, processor]} if nested else processor
    save(tmp_path, data, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    outline, path = vocab_gguf(tmp_path, 2048)
    assert (vocabulary(outline)["add_bos_token"], vocabulary(outline)["add_eos_token"]) == (True, eos)
    reference = tokenizers.Tokenizer.from_str(json.dumps(data))
    with LlamaCpp(path) as loaded:
        assert loaded.tokenize("Hello world", add_special=True) == reference.encode("Hello world").ids


def test_explicit_settings_overrule_the_post_processor(tmp_path: Path) -> None:
    data = copy_tokenizer("llama", tmp_path)
    data["post_processor"] = TEMPLATE
    save(tmp_path, data, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>", add_bos_token=False)
    outline, _ = vocab_gguf(tmp_path, 2048)
    assert not vocabulary(outline)["add_bos_token"]


def test_a_bos_that_does_not_exist_is_not_added(tmp_path: Path) -> None:
    data = copy_tokenizer("qwen", tmp_path)
    save(tmp_path, data, add_bos_token=True)
    outline, path = vocab_gguf(tmp_path, 2048)
    assert not vocabulary(outline)["add_bos_token"]
    LlamaCpp(path).close()  # llama.cpp refuses a file that asks for a BOS it does not name


def test_every_end_token_of_the_generation_config_stops_a_reply(tmp_path: Path) -> None:
    data = copy_tokenizer("llama", tmp_path)
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    texts = ["<|turn_over|>", "<|eot_id|>", "<|call_over|>", "<|show_over|>"]
    data["added_tokens"] += [{"id": 2048 + i, "content": text, **more} for i, text in enumerate(texts)]
    save(tmp_path, data, eos_token="<|end_of_text|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2048, 2049, 2050, 2051]}))
    outline, path = vocab_gguf(tmp_path, 2052, eos_token_id=1)
    assert outline.stop == ["<|end_of_text|>", *texts]
    assert any("'<|show_over|>', which also ends a reply" in note for note in outline.notes)
    with LlamaCpp(path) as loaded:
        assert [
            bool(loaded._lib.llama_vocab_is_eog(loaded._vocab, token)) for token in (1, 2048, 2049, 2050, 2051, 5)
        ] == [True] * 4 + [False, False]


def test_ends_that_llama_cpp_knows_are_control_tokens_and_need_no_key(tmp_path: Path) -> None:
    data = copy_tokenizer("llama", tmp_path)
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    texts = ["<|return|>", "<|call|>", "<|end|>", "[EOS]", "<|fim_pad|>", "<tool_call>", "<|channel|>"]
    data["added_tokens"] += [
        {"id": 2048 + i, "content": text, "special": text in ("<|end|>", "<|channel|>"), **more}
        for i, text in enumerate(texts)
    ]
    save(tmp_path, data, eos_token="<|return|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2048, 2049, 2050, 2051]}))
    outline, path = vocab_gguf(tmp_path, 2055)
    made = vocabulary(outline)
    assert made["token_type"][2048:] == [3, 3, 3, 3, 3, 4, 3]
    assert made["eos_token_id"] == 2048
    assert not {"eot_token_id", "eom_token_id"} & made.keys()
    assert any("does not end a reply at this vocabulary's '<|end|>'" in note for note in outline.notes)
    with LlamaCpp(path) as loaded:
        ends = {t for t in range(2055) if loaded._lib.llama_vocab_is_eog(loaded._vocab, t)}
    assert ends >= {2048, 2049, 2051, 2052}
    assert 2050 not in ends


@pytest.mark.parametrize(
    ("folder", "others", "name"),
    [("my-phi-3", True, "My-Phi-3"), ("fi-3", True, "Fi 3"), ("my-Phi3", False, "my-Phi 3")],
)
def test_a_models_name_is_one_by_which_llama_cpp_strips_white_space_or_loads(
    folder: str, others: bool, name: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    data = copy_tokenizer("llama", tmp_path / folder)
    more = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    texts = ["<|end|>", "<|user|>", *(["<s>", "</s>", "<unk>", "<|endoftext|>"] if others else [])]
    known = {token["content"] for token in data["added_tokens"]}
    new = [text for text in texts if text not in known]
    data["added_tokens"] += [
        {"id": 2048 + i, "content": text, "rstrip": text in ("<|end|>", "<|user|>"), **more}
        for i, text in enumerate(new)
    ]
    save(tmp_path / folder, data, eos_token="<|end|>")
    outline, path = vocab_gguf(tmp_path / folder, 2048 + len(new), _name_or_path=None if others else f"me/{folder}")
    fast = tokenizers.Tokenizer.from_str(json.dumps(data))
    text = "<|user|>\nHi<|end|> \n<|user|> you"
    with LlamaCpp(path) as loaded:
        strips = loaded.tokenize(text) == fast.encode(text, add_special_tokens=False).ids
    assert strips == (folder == "my-phi-3")
    notes = [note for note in outline.notes if "strips white space next to 2 special tokens" in note]
    assert len(notes) == (not strips)
    refused = [note for note in outline.notes if "llama.cpp refuses 'my-Phi3' for a vocabulary without '</s>'" in note]
    assert len(refused) == (not others)
    assert outline.metadata["general.name"].value == name


def test_an_ordinary_token_that_serves_as_padding_stays_ordinary(tmp_path: Path) -> None:
    data = copy_tokenizer("llama", tmp_path)
    save(tmp_path, data)
    outline, path = vocab_gguf(tmp_path, 2048, pad_token_id=2)
    assert special_text(outline.metadata, Keys.Tokenizer.PAD_ID) == "!"
    with LlamaCpp(path) as loaded:
        assert loaded.tokenize("Oh!", parse_special=False)[-1] == 2
        assert loaded.detokenize(loaded.tokenize("Oh!"), special=False) == "Oh!"


# --- chat templates ---


def field(path: Path, key: str) -> Any:
    found = GGUFReader(str(path)).get_field(key)
    return found.contents() if found else None


def test_chat_templates_are_found_wherever_transformers_puts_them(tmp_path: Path) -> None:
    data = copy_tokenizer("qwen", tmp_path)
    save(tmp_path, data, chat_template="{{ one }}")
    _, path = vocab_gguf(tmp_path, 2048)
    assert field(path, "tokenizer.chat_template") == "{{ one }}"
    named = [{"name": "tool_use", "template": "{{ tool }}"}, {"name": "default", "template": "{{ two }}"}]
    save(tmp_path, data, chat_template=named)
    _, path = vocab_gguf(tmp_path, 2048)
    assert field(path, "tokenizer.chat_template") == "{{ two }}"
    assert field(path, "tokenizer.chat_template.tool_use") == "{{ tool }}"
    (tmp_path / "chat_template.jinja").write_text("{{ file }}")
    assert field(vocab_gguf(tmp_path, 2048)[1], "tokenizer.chat_template") == "{{ file }}"


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
        (b"{{ '\xff' }}", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_chat_template_is_refused(tmp_path: Path, name: str, content: bytes, cause: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BridgeError, match=f"{Path(name).name}: .*{cause}"):
        read_chat_templates(tmp_path, {})


@pytest.mark.parametrize("value", [[5], [{"name": ["a"], "template": "x"}], [{"name": "a", "template": 3}], [None]])
def test_entries_that_are_no_chat_templates_are_passed_over(tmp_path: Path, value: list[object]) -> None:
    assert read_chat_templates(tmp_path, {"chat_template": value}) == {}


def test_a_model_without_chat_template_has_none(tmp_path: Path) -> None:
    copy_tokenizer("qwen", tmp_path)
    _, path = vocab_gguf(tmp_path, 2048)
    assert field(path, "tokenizer.chat_template") is None


# --- SentencePiece ---


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.model of BPE with byte fallback, like Llama 2's, trained on words of the project's tokenizer."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    text = folder / "text.txt"
    own = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    words = [own.decode([token]).strip() for token in range(own.get_vocab_size())]
    text.write_text("\n".join([*spm_texts() * 4, *(" ".join(words[i::64]) for i in range(64))]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


SPM_SETTINGS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}


def spm_tokenizer_json(model: Path, kind: str) -> dict[str, Any]:
    """What transformers makes of Llama's tokenizer.model: all pairs of pieces that join to a piece, by score."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for i, piece in enumerate(pieces):
        splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))] if not piece.startswith("<") else []
        known = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges += [(processor.get_score(i), *pair) for pair in sorted(known, key=lambda p: (vocab[p[0]], vocab[p[1]]))]
    merges.sort(key=lambda merge: -merge[0])
    prepend = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i], **special} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": prepend} if kind == "normalizer" else None,
        "pre_tokenizer": metaspace if kind == "metaspace" else None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteFallback"},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
            "merges": [f"{left} {right}" for _, left, right in merges],
        },
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["normalizer", "metaspace"])
def test_sentencepiece_from_tokenizer_json_gives_the_tokenizers_ids(
    kind: str, sentencepiece_model: Path, tmp_path: Path
) -> None:
    data = spm_tokenizer_json(sentencepiece_model, kind)
    save(tmp_path, data, **SPM_SETTINGS)
    outline, path = vocab_gguf(tmp_path, 1000)
    assert vocabulary(outline)["model"] == "llama"
    assert vocabulary(outline)["add_space_prefix"] is True
    reference = tokenizers.Tokenizer.from_str(json.dumps(data))
    with LlamaCpp(path) as loaded:
        for text in spm_texts():
            if kind == "metaspace" and text.startswith(" "):
                continue  # the one rule of Metaspace that llama.cpp has not
            assert loaded.tokenize(text, add_special=True) == reference.encode(text).ids, text


def test_sentencepiece_from_tokenizer_model_gives_the_models_ids(sentencepiece_model: Path, tmp_path: Path) -> None:
    import sentencepiece

    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPM_SETTINGS))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<extra>": 1000}))
    outline, path = vocab_gguf(tmp_path, 1001)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    assert {key: v for key, v in vocabulary(outline).items() if key.endswith("_id")} == ids
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert vocabulary(outline)["token_type"][:4] == kinds
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    with LlamaCpp(path) as loaded:
        for text in spm_texts():
            assert loaded.tokenize(text, add_special=True) == [1, *processor.encode(text)], text
        assert loaded.tokenize("<extra>") == [1000]


@pytest.mark.parametrize(
    ("settings", "bos"),
    [
        (None, True),
        ({"tokenizer_class": "LLaMATokenizer"}, True),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ],
)
def test_a_tokenizer_model_prepends_bos_as_transformers_llama_does(
    settings: dict | None, bos: bool, sentencepiece_model: Path, tmp_path: Path
) -> None:
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    outline, _ = vocab_gguf(tmp_path, 1000, bos_token_id=1, eos_token_id=2)
    assert vocabulary(outline)["add_bos_token"] is bos


def test_the_tokenizer_json_that_transformers_makes_of_a_tokenizer_model_gives_its_ids(
    sentencepiece_model: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(sentencepiece_model, source / "tokenizer.model")
    (source / "tokenizer_config.json").write_text(json.dumps(SPM_SETTINGS | {"add_bos_token": True}))
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(tmp_path)
    outline, path = vocab_gguf(tmp_path, 1000)
    assert vocabulary(outline)["add_bos_token"]
    assert vocabulary(outline)["token_type"][:3] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    with LlamaCpp(path) as loaded:
        for text in spm_texts():
            if not text.startswith(" "):
                assert loaded.tokenize(text, add_special=True) == tokenizer(text)["input_ids"], text


def test_both_routes_to_sentencepiece_agree_on_the_order_of_joining(sentencepiece_model: Path, tmp_path: Path) -> None:
    shutil.copyfile(sentencepiece_model, tmp_path / "tokenizer.model")
    from_model, _ = vocab_gguf(tmp_path, 1000)
    save(tmp_path, spm_tokenizer_json(sentencepiece_model, "normalizer"), **SPM_SETTINGS)
    from_json, _ = vocab_gguf(tmp_path, 1000)
    assert vocabulary(from_model)["tokens"] == vocabulary(from_json)["tokens"]
    assert vocabulary(from_model)["token_type"] == vocabulary(from_json)["token_type"]

    def order(scores: list[float] | None, tokens: list[str]) -> list[str]:
        assert scores is not None
        joined = [i for i in range(len(tokens)) if len(tokens[i]) > 1 and not tokens[i].startswith("<")]
        return [tokens[i] for i in sorted(joined, key=lambda i: -scores[i])]

    assert order(vocabulary(from_model)["scores"], vocabulary(from_model)["tokens"]) == order(
        vocabulary(from_json)["scores"], vocabulary(from_json)["tokens"]
    )


def test_a_tokenizer_without_space_prefix_says_so_to_llama_cpp(sentencepiece_model: Path, tmp_path: Path) -> None:
    data = spm_tokenizer_json(sentencepiece_model, "metaspace")
    data["pre_tokenizer"]["prepend_scheme"] = "never"
    save(tmp_path, data, **SPM_SETTINGS)
    outline, path = vocab_gguf(tmp_path, 1000)
    assert vocabulary(outline)["add_space_prefix"] is False
    reference = tokenizers.Tokenizer.from_str(json.dumps(data))
    with LlamaCpp(path) as loaded:
        assert loaded.tokenize("Hello you", add_special=True) == reference.encode("Hello you").ids


# --- what cannot be converted ---


def refused(folder: Path, match: str, size: int = 64) -> None:
    with pytest.raises(BridgeError, match=match):
        vocab_gguf(folder, size)


def test_a_folder_without_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    refused(tmp_path, r"neither tokenizer.json nor tokenizer.model; .*save_pretrained")


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"type": "WordLevel", "vocab": {}}})
    refused(tmp_path, "the tokenizer is a WordLevel, only BPE, WordPiece and Unigram can be converted")


def test_a_bpe_of_characters_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}})
    refused(tmp_path, "neither byte-level nor has byte_fallback")


def test_a_damaged_tokenizer_json_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    refused(tmp_path, r"tokenizer.json: not JSON")


def test_a_damaged_merge_is_shown(tmp_path: Path) -> None:
    data = {"model": {"type": "BPE", "byte_fallback": True, "vocab": {"a": 0}, "merges": ["aa"]}}
    save(tmp_path, data)
    refused(tmp_path, "the merge 'aa' is not a pair of tokens")


def test_a_tokenizer_model_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\nIw== 2\n")  # tiktoken's
    refused(tmp_path, "not a SentencePiece model")


def protobuf(*fields: tuple[int, int | float | bytes]) -> bytes:
    """A message of (number, value): varints, fixed 32 bits, bytes; all below 128."""
    wire = {int: (0, lambda v: bytes([v])), float: (5, lambda v: struct.pack("<f", v))}
    wire[bytes] = 2, lambda v: bytes([len(v)]) + v
    return b"".join(bytes([8 * n + wire[type(v)][0]]) + wire[type(v)][1](v) for n, v in fields)


@pytest.mark.parametrize(
    "piece",
    [
        [(1, b"b"), (2, 3)],
        [(1, b"b"), (2, b"1.0")],
        [(1, b"b"), (2, float("nan"))],
        [(1, b"b"), (2, float("-inf"))],
        [(1, b"b"), (3, 0)],
        [(1, b"b"), (3, 7)],
        [(1, b"b"), (3, b"1")],
        [(1, b"<0xZZ>"), (3, 6)],
        [(1, b"b"), (3, 6)],
        [(1, 5)],
        [(1, b"\xff")],
        [(2, 1.0)],
    ],
)
def test_a_tokenizer_model_with_a_malformed_piece_is_refused(tmp_path: Path, piece: list[Any]) -> None:
    sound = protobuf((1, protobuf((1, b"a"), (2, -1.0), (3, 1)))), protobuf((2, protobuf((3, 2))))
    file = tmp_path / "tokenizer.model"
    file.write_bytes(sound[0] + sound[1])
    assert vocabulary(vocab_gguf(tmp_path, 64)[0])["tokens"][0] == "a"
    file.write_bytes(sound[0] + protobuf((1, protobuf(*piece))) + sound[1])
    refused(tmp_path, "tokenizer.model: not a SentencePiece model; take the tokenizer.json")


def test_half_a_character_in_a_token_or_a_chat_template_is_refused(sentencepiece_model: Path, tmp_path: Path) -> None:
    data = spm_tokenizer_json(sentencepiece_model, "metaspace")
    save(tmp_path, data, chat_template="\ud83d")
    refused(tmp_path, "not as tokenizers and transformers write it .UnicodeEncodeError", 1000)
    data["added_tokens"].append({"id": 1000, "content": "\ud83d", "special": False})
    save(tmp_path, data)
    refused(tmp_path, "not as tokenizers and transformers write it .UnicodeEncodeError", 1001)


def test_a_byte_token_has_nothing_behind_it(sentencepiece_model: Path, tmp_path: Path) -> None:
    data = spm_tokenizer_json(sentencepiece_model, "metaspace")
    data["model"]["vocab"] |= {"<0x41>\n": 1000, "<0x4>": 1001}
    save(tmp_path, data)
    types = vocabulary(vocab_gguf(tmp_path, 1002)[0])["token_type"]
    assert types[1000:] == [TokenType.NORMAL, TokenType.NORMAL]
    assert types.count(TokenType.BYTE) == 256


def test_a_unigram_tokenizer_model_is_refused(tmp_path: Path) -> None:
    piece = b"\x0a\x01a\x15\x00\x00\x00\x00"
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a" + bytes([len(piece)]) + piece + b"\x12\x02\x18\x01")
    refused(tmp_path, "type 1; must be BPE")


def write_tiktoken(folder: Path, vocab: dict[str, int], **settings: Any) -> None:
    """The tokens of a byte-level vocabulary as a tiktoken.model, their ids as ranks."""
    lines = (
        base64.b64encode(bytes(byte_of()[c] for c in text)) + f" {token}".encode() for text, token in vocab.items()
    )
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    added = {str(len(vocab)): {"content": "[EOS]", "special": True}}
    text = json.dumps({"added_tokens_decoder": added, "eos_token": "[EOS]", **settings})
    (folder / "tokenizer_config.json").write_text(text)


def test_a_tiktoken_model_gives_the_merges_that_its_ranks_imply(tmp_path: Path) -> None:
    data = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocab = {text: token - 1 for text, token in data["vocab"].items() if token}
    write_tiktoken(tmp_path, vocab, tokenizer_class="TikTokenTokenizer")
    keys = vocabulary(vocab_gguf(tmp_path, len(vocab) + 1)[0])
    assert keys["pre"] == "kimi-k2"
    assert keys["merges"] == [" ".join(merge) for merge in data["merges"]]
    assert keys["tokens"] == [*vocab, "[EOS]"]
    assert keys["eos_token_id"] == len(vocab)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (
            b"IQ== 0",
            {"tokenizer_class": "Other"},
            r"tiktoken.model: its splitting rules are unknown; give pre='NAME'",
        ),
        (b"I? 0", {"tokenizer_class": "TikTokenTokenizer"}, r"tiktoken.model: is not a list of tokens and ranks"),
    ],
)
def test_a_tiktoken_model_that_is_none_is_refused(content: bytes, settings: dict, message: str, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BridgeError, match=message):
        vocab_gguf(tmp_path, 64)


PLAMO = [
    ["<|plamo:unk|>", 0.0, "UNKNOWN"], ["<|plamo:bos|>", 0.0, "CONTROL"], ["<|plamo:eos|>", 0.0, "CONTROL"],
    ["<|plamo:pad|>", 0.0, "CONTROL"], ["<|plamo:op|>", 0.0, "NORMAL"],
    *([f"<0x{byte:02X}>", -9.0, "BYTE", 8, 1, 0, 0] for byte in range(256)),
    ["a", -1.0, "NORMAL"], ["ab", -1.5, "NORMAL"],
]  # fmt: skip


def test_plamos_tokens_have_their_scores_and_kinds(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PLAMO))
    settings = {"bos_token": "<|plamo:bos|>", "eos_token": "<|plamo:eos|>", "unk_token": "<|plamo:unk|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = Config({"vocab_size": 266}, tmp_path / "config.json")
    tokenizer = read_tokenizer(config, tmp_path, {}, None)
    assert (tokenizer.model, tokenizer.pre) == ("plamo2", "default")
    assert tokenizer.tokens[:5] + tokenizer.tokens[-5:] == [
        *(line[0] for line in PLAMO[:5]), "a", "ab", "[PAD1]", "[PAD2]", "[PAD3]"
    ]  # fmt: skip
    kinds = [TokenType.UNKNOWN, *4 * [TokenType.CONTROL], *256 * [TokenType.BYTE], *2 * [TokenType.NORMAL]]
    assert tokenizer.types == [*map(int, kinds), *3 * [int(TokenType.UNUSED)]]
    assert tokenizer.scores == [*(line[1] for line in PLAMO), *3 * [-1000.0]]
    assert {role: tokenizer.ids[role] for role in ("bos", "eos", "unk", "eot")} == {
        "bos": 1,
        "eos": 2,
        "unk": 0,
        "eot": 4,
    }


@pytest.mark.parametrize("line", ["[1, 2]", '["a", "b", "NORMAL"]', '{"a": 1}', "nonsense"])
def test_a_line_that_is_no_token_of_plamo_is_told(line: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.jsonl").write_text(f'["a", 0.0, "NORMAL"]\n{line}\n')
    with pytest.raises(BridgeError, match=r"tokenizer\.jsonl: line 2 is .* not \[text, score, kind\]"):
        read_tokenizer(Config({"vocab_size": 2}, tmp_path / "config.json"), tmp_path, {}, None)
