"""--upload: the files and the model card that go to the Hub, and what is refused before the work begins."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

import bridge
from bridge.checkpoint.write.report import Written
from bridge.cli import main
from bridge.errors import BridgeError
from tests.conftest import CHECKPOINT

README = "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: maker/Model\ntags: [gptq]\n---\n# Its own card\n"
ANSWER = SimpleNamespace(headers={}, request=None, status_code=401)


class Hub:
    """Stands in for HfApi: remembers what is committed."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.exists, self.private = False, False
        self.role = "write"
        self.made: list[bool | None] = []
        self.fails: BaseException | None = None

    def whoami(self) -> dict[str, Any]:
        if self.role == "none":
            raise HfHubHTTPError("401 Unauthorized", response=ANSWER)  # type: ignore[arg-type]
        return {"name": "me", "auth": {"accessToken": {"role": self.role}}}

    def repo_info(self, name: str) -> SimpleNamespace:
        if not self.exists:
            raise RepositoryNotFoundError("404", response=ANSWER)  # type: ignore[arg-type]
        return SimpleNamespace(private=self.private)

    def create_repo(self, name: str, private: bool | None, exist_ok: bool) -> None:
        assert exist_ok
        self.made.append(private)

    def file_exists(self, name: str, file: str) -> bool:
        return file in self.files

    def hf_hub_download(self, name: str, file: str) -> str:
        path = self.cache / file
        path.write_bytes(self.files[file])
        return str(path)

    def create_commit(self, name: str, operations: list[Any], commit_message: str) -> None:
        if self.fails:
            raise self.fails
        for add in operations:
            data = add.path_or_fileobj
            self.files[add.path_in_repo] = data if isinstance(data, bytes) else Path(data).read_bytes()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Hub:
    found = Hub()
    found.cache = tmp_path_factory.mktemp("cache")  # type: ignore[attr-defined]
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    return found


def card_of(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and body."""
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_a_converted_file_goes_to_the_hub_with_a_card_of_its_report(hub, model, run, tmp_path) -> None:
    (model / "README.md").write_text(README)
    said = run("convert", model, tmp_path / "model.gguf", "--upload", "org/new-GGUF", "--private")
    assert said.endswith("uploaded 1 file to https://huggingface.co/org/new-GGUF with a model card\n")
    assert hub.made == [True]
    assert hub.files.keys() == {"model.gguf", "README.md"}
    assert hub.files["model.gguf"] == (tmp_path / "model.gguf").read_bytes()
    front, body = card_of(hub.files["README.md"].decode())
    assert front == {
        "base_model": "maker/Model",
        "base_model_relation": "quantized",
        "language": ["en"],
        "library_name": "gguf",
        "license": "apache-2.0",
        "tags": ["gguf", "llama.cpp"],
    }
    assert "# new-GGUF\n" in body
    assert "made from [maker/Model](https://huggingface.co/maker/Model) (gptq)" in body
    assert "| attn_q | 4 | Q4_K | 4.50 | 100% |" in body
    assert "llama-cli -hf org/new-GGUF\nollama run hf.co/org/new-GGUF\n" in body
    assert "gguf-bridge run model.gguf" in body
    assert "applies: apache-2.0." in body
    assert str(tmp_path) not in body


def test_all_shards_are_uploaded(hub, run, tmp_path) -> None:
    run("convert", CHECKPOINT, tmp_path / "m.gguf", "--split-max-size", "1M", "--upload", "org/name")
    shards = [file.name for file in tmp_path.iterdir()]
    assert len(shards) > 1
    assert hub.files.keys() == {*shards, "README.md"}
    assert all(f"| {shard} |" in hub.files["README.md"].decode() for shard in shards)


def test_the_card_of_a_checkpoint_without_a_known_origin_names_none(hub, run, tmp_path) -> None:
    run("convert", CHECKPOINT, tmp_path / "m.gguf", "--upload", "org/name")
    front, body = card_of(hub.files["README.md"].decode())
    assert front == {"library_name": "gguf", "tags": ["gguf", "llama.cpp"]}
    assert "The license of the checkpoint applies: not named in it." in body


def test_a_card_that_somebody_wrote_is_kept_and_an_earlier_one_replaced(hub, run, tmp_path) -> None:
    hub.files["README.md"] = b"# By hand"
    arguments = ("repack", CHECKPOINT, tmp_path / "new", "--upload", "org/name")
    assert run(*arguments).endswith("its own model card was kept\n")
    assert hub.files["README.md"] == b"# By hand"
    del hub.files["README.md"]
    run(*arguments, "--force")
    first = hub.files["README.md"]
    hub.files["README.md"] = first + b"changed"
    run(*arguments, "--force")
    assert hub.files["README.md"] == first


def test_a_repacked_checkpoint_is_uploaded_with_all_its_files(hub, model, run, tmp_path) -> None:
    (model / "README.md").write_text(README)
    run("repack", model, tmp_path / "new", "--checkpoint-format", "gptq_v2", "--upload", "org/name")
    assert hub.files.keys() == {file.name for file in (tmp_path / "new").iterdir()}
    assert (tmp_path / "new" / "README.md").read_text() == README
    front, body = card_of(hub.files["README.md"].decode())
    assert (front["base_model"], front["library_name"], front["tags"]) == ("maker/Model", "transformers", ["gptq"])
    assert "A GPTQ checkpoint, repacked from [maker/Model]" in body
    assert "| qzeros | 28 of 28 modules rewritten as v2: 28 from v1 |" in body


def test_a_quantized_checkpoint_tells_what_its_layers_lost(hub, tmp_path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    bridge.upload(Written([tmp_path], 1.0, "awq", 10**9, 14, lost=(0.01, 0.02), home=CHECKPOINT), "org/name")
    assert hub.files.keys() == {"model.safetensors", "README.md"}
    body = hub.files["README.md"].decode()
    assert "| layers | 14 quantized as awq |" in body
    assert "| error | outputs of layers lost 1% of their power on average, 2% at most |" in body


def test_what_verify_returned_can_be_uploaded_too(hub, model, auto) -> None:
    (model / "README.md").write_text(README)
    bridge.upload(bridge.verify(auto, model), "org/name")
    assert hub.files.keys() == {auto.name, "README.md"}
    assert card_of(hub.files["README.md"].decode())[0]["base_model"] == "maker/Model"


def test_card_only_writes_the_card_and_the_list_of_files_without_a_network(monkeypatch, run, tmp_path) -> None:
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(huggingface_hub, "HfApi", never)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    out, folder = tmp_path / "m.gguf", tmp_path / "card"
    said = run("convert", CHECKPOINT, out, "--upload", "org/name", "--card-only", folder)
    assert said.endswith("nothing was uploaded\n")
    card = (folder / "README.md").read_bytes()
    assert b"ollama run hf.co/org/name" in card
    assert (folder / "files.txt").read_text() == f"README.md\t{len(card)}\nm.gguf\t{out.stat().st_size}\n"


@pytest.mark.parametrize(
    ("options", "state", "message"),
    [
        (["--upload", "name"], {}, "name: is not a name of a repository on the Hub; give org/name"),
        (["--upload", "org/na me"], {}, "org/na me: is not a name"),
        (["--upload", "org/name@branch"], {}, "org/name@branch: is not a name"),
        (["--upload", "org/a--b"], {}, "org/a--b: is not a name"),
        (["--upload", "org/name.git"], {}, "org/name.git: is not a name"),
        (["--upload", "https://huggingface.co/org/name"], {}, "give org/name"),
        (["--upload", "org/name"], {"token": None}, "needs a login on the Hub; run `hf auth login`, or set HF_TOKEN"),
        (["--upload", "org/name"], {"role": "none"}, "the Hub does not accept the login"),
        (["--upload", "org/name"], {"role": "read"}, "the login may only read"),
        (["--upload", "org/name", "--private"], {"exists": True}, "exists and is public"),
        (["--private"], {}, "--private is for uploads: give --upload org/name"),
        (["--card-only", "card"], {}, "--card-only is for uploads"),
        (["--upload", "org/name", "--card-only", "taken"], {}, "README.md: exists"),
        (["--upload", "org/name", "--card-only", "model"], {}, "is in the checkpoint's folder"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "quantize", "repack"])
def test_what_cannot_be_uploaded_is_refused_before_the_work(
    command, options, state, message, hub, model, refused, tmp_path, monkeypatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError

    for name in ("converter.convert_as", "checkpoints.to_checkpoint.quantize_checkpoint"):
        monkeypatch.setattr(f"bridge.conversion.{name}", never)
    monkeypatch.setattr("bridge.conversion.checkpoints.repack.repack", never)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "README.md").write_text("mine")
    (tmp_path / "text.txt").write_text("words")
    if "token" in state:
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    vars(hub).update(state)
    more = ["--format", "gptq", "--calibrate", "text.txt"] if command == "quantize" else []
    assert message in refused(command, "model", "new", *more, *options)


def test_one_shard_is_not_uploaded(refused, tmp_path) -> None:
    plan = ["--plan", tmp_path / "plan.json", "--shard", "1/2"]
    assert "--upload is for whole models" in refused("convert", *plan, tmp_path / "o.gguf", "--upload", "org/name")


@pytest.mark.parametrize("how", ["file", "shards", "folder"])
def test_a_failed_upload_keeps_everything_and_names_the_commands_that_repeat_it(
    how, hub, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.fails = OSError("the line is dead")
    if how == "folder":
        result: Any = bridge.repack(CHECKPOINT, "out dir/new")
        files = "'out dir/new' ."
    else:
        result = bridge.convert(CHECKPOINT, "out dir/m.gguf", split_max_size=10**6 if how == "shards" else None)
        count = len(result.outputs)
        files = f"'out dir' . --include 'm-*-of-{count:05}.gguf'" if count > 1 else "'out dir/m.gguf' m.gguf"
    with pytest.raises(BridgeError, match="the upload to org/name failed") as error:
        bridge.upload(result, "org/name", private=True)
    first, second = str(error.value).partition("this uploads it: ")[2].split(" && ")
    assert first == f"hf upload org/name --private {files}"
    *start, card, name = shlex.split(second)
    assert (start, name) == (["hf", "upload", "org/name", "--private"], "README.md")
    assert "# name" in Path(card).read_text()
    hub.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt, match=r"stopped; everything was made, and this uploads it: hf upload"):
        bridge.upload(result, "org/name")


def test_the_command_line_tells_of_a_failed_upload_after_the_report(hub, tmp_path, capsys) -> None:
    hub.fails = OSError("the line is dead")
    assert main(["convert", str(CHECKPOINT), str(tmp_path / "m.gguf"), "--upload", "org/name"]) == 2
    out, error = capsys.readouterr()
    assert f"wrote {tmp_path / 'm.gguf'}" in out
    assert "(the line is dead)" in error
    assert (tmp_path / "m.gguf").exists()
