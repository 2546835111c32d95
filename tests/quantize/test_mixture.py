"""Calibration on several texts and on none: shares, the default mixture, the model's own samples, what is held back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.errors import BridgeError, BridgeWarning
from bridge.quantize import Method, quantize_model, superblocks
from bridge.quantize.model.float_model import FloatModel
from bridge.quantize.quantizer import LayerInput
from bridge.quantize.run.calibration_text import calibration_set, enough_of
from bridge.quantize.settings import Calibration
from bridge.quantize.solve.hessian import Hessian, _lost, best_shrinkage, damp, shrinkage_of, shrunk
from bridge.quantize.text import default_text, mixture
from bridge.quantize.text.mixture import calibration_sequences
from bridge.quantize.text.own_samples import fits_in_memory, own_samples
from bridge.quantize.text.sources import Source, divided, sources_of
from bridge.quantize.text.texts import load_tokenizer
from tests.conftest import CHECKPOINT
from tests.support.tiny_models import save_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(CHECKPOINT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(
        tmp_path_factory.mktemp("model"), "LlamaConfig", hidden_size=32, intermediate_size=64, vocab_size=2048
    )


def shares(*given: str) -> list[tuple[str, float]]:
    return [(str(source), round(source.share, 6)) for source in sources_of(given)]


def test_texts_without_a_weight_share_what_is_left(tmp_path: Path) -> None:
    assert shares("a.txt", "b.jsonl:0.3", "default:0.2") == [("a.txt", 0.5), ("b.jsonl", 0.3), ("default", 0.2)]
    assert shares("a.txt", "b.txt", "c.txt") == [("a.txt", 0.333333), ("b.txt", 0.333333), ("c.txt", 0.333333)]
    assert shares("a.txt:0.25", "b.txt:.75") == [("a.txt", 0.25), ("b.txt", 0.75)]
    assert shares("C:\\a.txt") == [("C:\\a.txt", 1)]
    (tmp_path / "a:0.5").write_text("a file with a colon")
    assert shares(str(tmp_path / "a:0.5")) == [(str(tmp_path / "a:0.5"), 1)]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["a:0.5", "b:0.4"], "add up to 0.9; they must add up to 1"),
        (["a:0.7", "b:0.4"], "add up to 1.1; they must add up to 1"),
        (["a:1.0", "b"], "add up to 1, which leaves nothing for b"),
        (["a:0.9", "b:0.3", "c"], "add up to 1.2, which leaves nothing for c"),
        (["a:0"], "a:0: a calibration text's weight must be above 0 and at most 1"),
        (["a:-1", "b"], "a:-1: a calibration text's weight must be above 0"),
        (["a:inf", "b"], "weight must be above 0 and at most 1"),
        (["a:nan", "b"], "weight must be above 0 and at most 1"),
        ([], "no calibration text is given"),
    ],
)
def test_weights_that_do_not_add_up_are_refused_also_by_the_settings(given: list[str], match: str) -> None:
    for ask in (sources_of, Calibration):
        with pytest.raises(BridgeError, match=match):
            ask(given)


def test_sequences_are_divided_by_share_to_the_last_one() -> None:
    assert divided(7, [0.5, 0.3, 0.2]) == [4, 2, 1]
    assert divided(10, [1 / 3] * 3) == [4, 3, 3]
    assert divided(128, [0.3, 0.7]) == [38, 90]


def test_each_file_gives_its_share_and_the_smallest_kinds_are_held_back_last(tmp_path: Path) -> None:
    for i, name in enumerate("abc"):
        np.save(tmp_path / f"{name}.npy", np.full((40, 8), i))
    names = [str(tmp_path / f"{name}.npy") for name in "abc"]
    found = calibration_sequences(sources_of([f"{names[0]}:0.25", names[1], f"{names[2]}:0.5"]), None, 32, 8)
    assert found.tokens[:, 0].tolist() == [1] * 8 + [2] * 16 + [0] * 8 or found.tokens[:, 0].tolist() == (
        [0] * 8 + [2] * 16 + [1] * 8
    )
    assert (found.held, found.drawn) == (8, 0)
    assert calibration_sequences(sources_of(names[:1]), None, 32, 8).held == 0


def test_a_short_file_of_several_is_told_and_one_whose_share_is_nothing_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((40, 8), np.int64))
    np.save(tmp_path / "b.npy", np.ones((3, 8), np.int64))
    both = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy")]
    with pytest.warns(BridgeWarning, match=r"b\.npy: gives 3 of the 8 calibration sequences of its share"):
        assert len(calibration_sequences(sources_of(both), None, 16, 8).tokens) == 11
    with pytest.raises(BridgeError, match=r"a\.npy: its share of 16 calibration sequences is less than one; give it"):
        calibration_sequences(sources_of([f"{both[0]}:0.01", both[1]]), None, 16, 8)


def test_an_empty_file_and_a_jsonl_without_text_are_refused_in_a_mixture(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "none.jsonl").write_text('{"id": 1}\n')
    for name, match in (("empty.txt", "is empty"), ("none.jsonl", "line 1 has no text")):
        with pytest.raises(BridgeError, match=match):
            calibration_sequences(sources_of(["default:0.5", str(tmp_path / name)]), tokenizer, 16, 32)


def test_the_default_mixture_is_half_own_samples_and_every_kind_of_shipped_text(tokenizer: Any) -> None:
    asked: list[tuple[int, int]] = []

    def own(count: int, length: int) -> torch.Tensor:
        asked.append((count, length))
        return torch.full((count, length), 7)

    found = calibration_sequences([Source(None, 1.0)], tokenizer, 32, 64, sampler=own)
    assert asked == [(16, 64)]
    assert (found.drawn, len(found.tokens)) == (16, 32)
    assert (found.tokens[:16] == 7).all()
    assert 8 <= found.held < 16
    windows = default_text.shipped_windows(tokenizer, 64)
    assert set(windows) == set(default_text.KINDS)
    there = {tuple(row) for row in found.read.tolist()}
    assert all(tuple(kind[1].tolist()) in there for kind in windows.values())  # two of each of eight kinds
    with pytest.raises(BridgeError, match=r"default text \w+\.\w+: holds token \d+, but the model's vocabulary"):
        calibration_sequences([Source(None, 1.0)], tokenizer, 16, 64, vocabulary=300)
    alone = calibration_sequences([Source(None, 1.0)], tokenizer, 16, 64)
    assert (alone.drawn, len(alone.tokens)) == (0, 16)


def test_the_shipped_texts_are_text_of_a_few_hundred_kilobytes_without_repetition() -> None:
    folder = Path(default_text.__file__).parents[1] / "calibration_text"
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    assert set(texts) == {*default_text.KINDS, "prompts.txt"}
    assert 200_000 < sum(map(len, texts.values())) < 400_000
    for name, text in texts.items():
        parts = [part for part in text.split("\n\n") if len(part) > 200]
        assert len(set(parts)) >= 0.9 * len(parts), name
    assert all(json.loads(line)["messages"] for line in texts["chats.jsonl"].splitlines())


def test_chats_take_the_tokenizers_template_where_it_has_one(tokenizer: Any) -> None:
    class Chatty:
        bos_token_id = None
        eos_token_id = 0
        special_tokens_map: dict[str, str] = {}  # noqa: RUF012 - as transformers has it

        def __call__(self, text: str, **options: Any) -> Any:
            return tokenizer(text, **options)

        def get_chat_template(self) -> str:
            every = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            return every + "{{ '<answer>' if add_generation_prompt }}"

    def starts(tokenizer_: Any) -> list[str]:
        return [tokenizer.decode(opening) for opening in default_text.openings(tokenizer_)]

    assert sum(text.endswith("<answer>") for text in starts(Chatty())) > 50
    assert not any("<answer>" in text for text in starts(tokenizer))
    text = tokenizer.decode(default_text.shipped_windows(Chatty(), 64)["chats.jsonl"][0])
    assert text.startswith("<user>")
    assert tokenizer.decode(default_text.shipped_windows(tokenizer, 64)["chats.jsonl"][0]).startswith("User: ")


def test_own_samples_follow_openings_and_the_models_own_prediction(model: Path) -> None:
    with bridge.open_checkpoint(model) as ckpt:
        floats = FloatModel(ckpt)
        openings, ends = [[5, 6, 7], [9]], [3]
        found = own_samples(floats, openings, ends, 3, 20)
        assert found is not None
        assert found.shape == (3, 20)
        assert [row[: len(o)] for row, o in zip(found.tolist(), [[5, 6, 7], [9], [5, 6, 7]], strict=True)] == [
            [5, 6, 7], [9], [5, 6, 7],
        ]  # fmt: skip
        assert torch.equal(found, own_samples(floats, openings, ends, 3, 20))
        assert not torch.equal(found, own_samples(floats, openings, ends, 3, 20, seed=1))
        every = own_samples(floats, openings, range(2048), 1, 9)  # each drawn token is an end
        assert every is not None
        assert [every[0, i] for i in (0, 1, 2, 4, 6, 7, 8)] == [5, 6, 7, 9, 5, 6, 7]
        assert all(p.device.type == "meta" for p in floats.model.parameters())
        assert not fits_in_memory(floats, 1000)
        assert fits_in_memory(floats, 1 << 40)
        # where tokens are drawn, they are as likely as the model says: the mean surprise is near the entropy
        some = own_samples(floats, [[5]], [], 16, 24)
        assert some is not None
        for part in (None, 0, 1):
            floats.load(part)
        floats.load_head()
        with torch.no_grad():
            logs = floats.model(some[:, :-1]).logits.log_softmax(-1)
        surprise = -logs.gather(2, some[:, 1:, None]).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        assert abs(surprise - entropy) < 0.25


def test_a_long_sequence_of_own_samples_is_several_rows_that_each_begin_with_an_opening(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.quantize.text.own_samples._LENGTH", 8)
    monkeypatch.setattr("bridge.quantize.text.own_samples._ROWS", 4)
    told: list[tuple[int, int]] = []
    with bridge.open_checkpoint(model) as ckpt:
        options: Any = {"progress": lambda *done: told.append(done)}
        found = own_samples(FloatModel(ckpt), [[5], [6], [7]], [], 2, 20, **options)
    assert found is not None
    assert found.shape == (2, 20)
    assert [row[at] for row in found.tolist() for at in (0, 7, 14)] == [5, 6, 7, 5, 6, 7]
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (40, 40)


def test_without_memory_for_the_model_the_shipped_texts_alone_are_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.quantize.run.calibration_text.free_memory", lambda: 1000)
    with (
        bridge.open_checkpoint(model) as ckpt,
        pytest.warns(BridgeWarning, match="its weights do not fit in memory, so it is calibrated without samples"),
    ):
        found = calibration_set(FloatModel(ckpt), Calibration(samples=8, length=64), ["model.layers.0.mlp.up_proj"])
    assert (found.drawn, len(found.tokens)) == (0, 8)


def test_sequences_held_back_are_gathered_by_themselves(model: Path) -> None:
    tokens = torch.randint(0, 320, (7, 16), generator=torch.Generator().manual_seed(0))
    name = "model.layers.0.self_attn.q_proj"
    found: list[Hessian] = []

    def gather(tokens: torch.Tensor, **options: Any) -> Hessian:
        with bridge.open_checkpoint(model) as ckpt:
            take = lambda layer: (found.append(layer.hessian) or layer.weight, None)  # noqa: E731
            list(quantize_model(FloatModel(ckpt), tokens, take, wanted=name.__eq__, batch=2, **options))
        return found[-1]

    both, held = gather(tokens, held=3), gather(tokens[4:])
    assert (both.tokens, both.held.tokens) == (7 * 16, 3 * 16)  # type: ignore[union-attr]
    torch.testing.assert_close(both.held.matrix, held.matrix)  # type: ignore[union-attr]
    assert gather(tokens).held is None


def kinds(columns: int, tokens: int) -> Hessian:
    """Two kinds of inputs with common and own correlations; the second one held back."""
    dice = torch.Generator().manual_seed(1)
    common, *own = (torch.randn(columns, columns, generator=dice) / columns**0.5 for _ in range(3))
    hessian = Hessian("layer", columns)
    for i, mix in enumerate(own):
        hessian.add(torch.randn(tokens, columns, generator=dice) @ (common + mix), held=i == 1)
    return hessian


def test_shrinkage_is_taken_where_it_serves_what_is_held_back() -> None:
    few = kinds(96, 150)
    chosen = shrinkage_of(few, 0.01)
    assert chosen > 0
    rest = (few.matrix * 300 - few.held.matrix * 150) / 150  # type: ignore[union-attr]
    costs = {s: _lost(rest, few.held.matrix, s, 0.01) for s in (0.0, chosen)}  # type: ignore[union-attr]
    assert costs[chosen] < 0.9 * costs[0.0]
    same = Hessian("layer", 32)
    inputs = torch.randn(4000, 32, generator=torch.Generator().manual_seed(2)) @ torch.randn(32, 32)
    same.add(inputs[:3000], held=False)
    same.add(inputs[3000:], held=True)
    assert shrinkage_of(same, 0.01) == 0
    assert shrinkage_of(Hessian("layer", 8), 0.01) == 0
    without = torch.tensor([[1.0, 1.2], [1.2, 1.0]])  # no factor before it is shrunk by more than 0.16
    assert best_shrinkage(without, torch.eye(2), 0.01)[0] >= 0.2
    half = shrunk(few.matrix, 0.5)
    torch.testing.assert_close(half.diagonal(), few.matrix.diagonal())
    torch.testing.assert_close(half[0, 1:], few.matrix[0, 1:] / 2)


def test_one_column_of_a_million_times_the_power_leaves_the_damping_of_the_others() -> None:
    inputs = torch.randn(2000, 256, generator=torch.Generator().manual_seed(3))
    plain, wild = Hessian("layer", 256), Hessian("layer", 256)
    plain.add(inputs)
    inputs[:, 9] *= 1000
    wild.add(inputs)
    added = []
    for hessian in (plain, wild):
        damped = hessian.matrix.clone()
        damp(damped, 0.01)
        added.append(float((damped - hessian.matrix).diagonal()[0]))
    assert added[0] == pytest.approx(0.02, rel=0.1)
    assert added[1] < 6 * added[0]  # 4,000 times by the mean


def test_one_column_of_a_million_times_the_power_leaves_the_error_on_other_tokens() -> None:
    """Damped by the mean, this layer has 5.6 times the error."""
    random = torch.Generator().manual_seed(3)
    falling = torch.arange(1, 257).float() ** -0.7
    mix = torch.randn(256, 256, generator=random) * falling @ torch.randn(256, 256, generator=random) / 16
    inputs = torch.randn(6000, 256, generator=random) @ mix
    weight = torch.randn(32, 256, generator=random)
    others = torch.arange(256) != 9

    def error(strength: float) -> float:
        seen = inputs[:4000].clone()
        seen[:, 9] *= strength
        hessian = Hessian("layer", 256)
        hessian.add(seen)
        lost = weight - Method(superblocks("Q4_K"), alpha=0).layer(LayerInput("layer", weight, hessian))[0]
        return float((lost[:, others] @ inputs[4000:, others].T).square().sum())

    assert error(1000) < 1.1 * error(1)


@pytest.mark.usefixtures("few_types")
def test_for_a_size_the_models_own_samples_are_drawn_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cli import main

    counts: list[int] = []

    def counted(*given: Any) -> torch.Tensor | None:
        counts.append(given[3])
        return own_samples(*given)

    monkeypatch.setattr(mixture, "MOST_SAMPLED", 64)
    monkeypatch.setattr("bridge.quantize.text.own_samples.own_samples", counted)
    command = ["quantize", str(model), str(tmp_path / "out.gguf"), "--bpw", "6"]
    assert main([*command, "--samples", "12", "--sequence-length", "16", "--method", "gptq"]) == 0
    assert len(counts) == 1


def test_of_the_tokens_costs_take_as_many_as_a_layer_wants() -> None:
    tokens = torch.arange(40).repeat_interleave(16).view(40, 16)
    assert enough_of(tokens, 16)[:, 0].tolist() == [0, 5, 10, 15, 20, 25, 30, 35]  # 8 tokens for each of 16 inputs
    assert torch.equal(enough_of(tokens, 1000), tokens)


def test_quantize_without_a_text_takes_the_default_mixture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge.cli import main

    monkeypatch.setattr(mixture, "MOST_SAMPLED", 64)
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(model), str(out), "--type", "Q8_0", "--samples", "12", "--sequence-length", "16"]) == 0
    assert out.exists()
    assert "tokens of default" in capsys.readouterr().out
    text = tmp_path / "a.txt"
    text.write_text("Some words to calibrate on. " * 200)
    arguments = ["quantize", str(model), str(out), "--force", "--type", "Q8_0", "--sequence-length", "16"]
    assert main([*arguments, "--samples", "8", "--calibrate", f"{text}:0.75", "default"]) == 0
    assert f"tokens of {text} and default" in capsys.readouterr().out
    assert main([*arguments, "--calibrate", f"{text}:0.75", "default:0.75"]) == 2
    assert "add up to 1.5; they must add up to 1" in capsys.readouterr().err
