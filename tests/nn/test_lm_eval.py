"""The model of EleutherAI's harness: scores and replies against its own backend on the same weights.

Runs where lm_eval is installed, which is large: pip install .[lm-eval] accelerate.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.errors import BridgeError
from tests.support.tiny_models import save_model

if any(find_spec(name) is None for name in ("lm_eval", "torch", "transformers", "accelerate")):
    pytest.skip("lm_eval is not installed", allow_module_level=True)

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from bridge.lm_eval import BridgeLM

QUESTIONS = [
    ("The quick brown fox jumps over the lazy", [" dog", " cat and the mouse", " house"], 0),
    ("One two three four", [" five", " six seven", " eight nine ten"], 0),
    ("A b c", [" d", " e f", ""], 1),
    ("", ["Anything at all", "nothing"], 0),
]
TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of floats, and the GGUF of them in it."""
    folder = save_model(tmp_path_factory.mktemp("lm_eval") / "m", "LlamaConfig", num_hidden_layers=1, vocab_size=2048)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    bridge.convert(folder, folder.parent / "m.gguf", tensor_types=[(".*", "F32")])
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> BridgeLM:
    return BridgeLM(str(folder.parent / "m.gguf"), precision="f32", kv="f32", max_length=128)


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=128, batch_size=1)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, a, i) for i, a in enumerate(arguments)]  # type: ignore[arg-type]


def test_scores_are_those_of_the_harness_own_backend(model: BridgeLM, peer: Any) -> None:
    pairs = [(question, choice) for question, choices, _ in QUESTIONS for choice in choices if choice]
    pairs += [("word " * 300, "and more"), pairs[0], ("x", "y " * 40)]  # truncated; asked again; of several rows
    found = model.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    expected = peer.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_whole_texts_are_scored_in_windows(model: BridgeLM, peer: Any) -> None:
    texts = [("Once upon a time.",), ("long " * 200,)]
    found = model.loglikelihood_rolling(asked("loglikelihood_rolling", *texts), disable_tqdm=True)
    expected = peer.loglikelihood_rolling(asked("loglikelihood_rolling", *texts), disable_tqdm=True)
    assert found == pytest.approx(expected, rel=1e-4)


def test_replies_end_at_stops_of_several_tokens(model: BridgeLM, peer: Any) -> None:
    (whole,) = model.generate_until(asked("generate_until", ("Once", {"until": [], "max_gen_toks": 12})), True)
    stop = whole[4:7]
    assert len(model.tok_encode(stop, add_special_tokens=False)) > 1
    how = [("Once", {"until": [stop], "max_gen_toks": 12}), ("A longer prompt", {"max_gen_toks": 5})]
    found = model.generate_until(asked("generate_until", *how), disable_tqdm=True)
    assert found[0] == whole[: whole.index(stop)]
    assert found == peer.generate_until(asked("generate_until", *how), disable_tqdm=True)
    with pytest.raises(BridgeError, match="max_gen_toks 128: must be below max_length 128"):
        model.generate_until(asked("generate_until", ("Once", {"max_gen_toks": 128})), disable_tqdm=True)


def test_chats_are_rendered_with_the_files_template(model: BridgeLM, peer: Any) -> None:
    history = [{"role": "user", "content": "Hello"}]
    prefilled = [*history, {"role": "assistant", "content": "The answer is"}]
    assert model.apply_chat_template(history) == "<|user|>Hello<|end|><|assistant|>"
    assert model.apply_chat_template(prefilled, False) == "<|user|>Hello<|end|><|assistant|>The answer is"
    for messages, prompt in ((history, True), (prefilled, False)):
        assert model.apply_chat_template(messages, prompt) == peer.apply_chat_template(messages, prompt)
    assert model.chat_template(True) == TEMPLATE


def test_a_task_of_local_files_has_the_same_results(folder: Path, model: BridgeLM, peer: Any, tmp_path: Path) -> None:
    rows = [
        {"question": q or "Say", "choices": [c or " g" for c in choices][:2], "answer": a % 2}
        for q, choices, a in QUESTIONS
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_choice.yaml").write_text(TASK.format(data=data))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def results(model: Any, **more: Any) -> Any:
        found = lm_eval.simple_evaluate(
            model=model, tasks=["own_choice"], task_manager=tasks, bootstrap_iters=0, **more
        )
        return {k: v for k, v in found["results"]["own_choice"].items() if k.startswith("acc")}

    by_name = results("gguf-bridge", model_args={"path": str(folder.parent / "m.gguf"), "precision": "f32"})
    assert by_name == results(model) == results(peer)
