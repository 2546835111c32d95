"""What was made goes to a repository of the Hugging Face Hub, with a model card (`model_card`).

    bridge.upload(bridge.convert("model-gptq", "model.gguf"), "org/name")

All files go into one commit. Files of the repository with other names stay, and so does a card that was not made here.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from bridge.checkpoint.files.hub import is_repository, reason
from bridge.checkpoint.repack import Rewritten
from bridge.checkpoint.write.report import Written
from bridge.conversion.checkpoints.repack import Repacked
from bridge.conversion.publish.model_card import CARD, MARK, files_of_result, model_card
from bridge.conversion.writing.report import Report
from bridge.errors import BridgeError, parameter
from bridge.system.options import checked
from bridge.system.report import CommandReport, FolderReport
from bridge.system.storage.files import write_text
from bridge.system.storage.outputs import NOTHING, ProtectedPaths, check_outputs

_LIST = "files.txt"
_TOKENS = "https://huggingface.co/settings/tokens"


@checked
def upload(
    result: Report | Repacked | Rewritten | Written,
    repository: str,
    *,
    private: bool = False,
    card_only: str | Path | None = None,
    force: bool = False,
) -> str:
    """Upload what `convert`, `repack` or `quantize` made, and a model card written from the report.

    result      what these functions returned
    repository  "org/name" on the Hub; it is made if it does not exist
    private     make the repository private
    card_only   a folder for the model card (README.md) and the list of files, instead of an upload; needs no network
    force       replace these two files

    Returns a line with the address. Raises BridgeError without a login, for a name that the Hub does not
    take, and where the upload fails; the message then has the command that uploads the files again.
    """
    hub = Upload(repository, private, None if card_only is None else Path(card_only), force)
    hub.check()
    return hub.send(result)


@dataclass(frozen=True)
class Upload:
    """Where results go: the parameters of `upload`. What can be known before hours of work is found by `check`."""

    repository: str
    private: bool = False
    card_only: Path | None = None
    force: bool = False

    def check(self, protected: ProtectedPaths = NOTHING) -> None:
        """BridgeError if an upload would fail by name, login, repository, or files that exist or are `protected`."""
        if not is_repository(self.repository):
            raise BridgeError(f"{self.repository}: is not a name of a repository on the Hub; give org/name")
        if self.card_only is not None:
            check_outputs([self.card_only / name for name in (CARD, _LIST)], self.force, protected)
            return
        self._check_login()
        self._check_repository()

    def _check_login(self) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HfHubHTTPError

        if get_token() is None:
            raise BridgeError(
                f"{self.repository}: an upload needs a login on the Hub; run `hf auth login`, or set HF_TOKEN"
            )
        try:
            account = HfApi().whoami()
        except HfHubHTTPError as problem:
            raise BridgeError(
                f"{self.repository}: the Hub does not accept the login ({reason(problem)}); run `hf auth login`, or "
                "set HF_TOKEN"
            ) from problem
        except Exception as problem:  # the HTTP client's own errors
            raise BridgeError(f"{self.repository}: the Hub cannot be reached ({reason(problem)})") from problem
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise BridgeError(f"{self.repository}: the login may only read; log in with a token that writes: {_TOKENS}")

    def _check_repository(self) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            repository = HfApi().repo_info(self.repository)
        except RepositoryNotFoundError:
            return  # it will be made
        except Exception as problem:
            raise BridgeError(f"{self.repository}: cannot be looked up on the Hub ({reason(problem)})") from problem
        if self.private and not repository.private:
            raise BridgeError(
                f"{self.repository}: exists and is public; make it private in its settings on the Hub, or leave out "
                f"{parameter('private', True)}"
            )

    def send(self, result: Report | Repacked | Rewritten | Written) -> str:
        """Upload everything; returns a line that says where it is."""
        files, card = files_of_result(result), model_card(result, self.repository)
        if self.card_only is not None:
            write_text(self.card_only / CARD, card)
            listed = [f"{name}\t{file.stat().st_size}\n" for name, file in files.items()]
            write_text(self.card_only / _LIST, "".join([f"{CARD}\t{len(card.encode())}\n", *listed]))
            return f"wrote {self.card_only / CARD} and {self.card_only / _LIST}; nothing was uploaded"
        try:
            keeps_card = self._commit(files, card)
        except (Exception, KeyboardInterrupt) as problem:
            again = self._by_hand(result, card)
            if isinstance(problem, KeyboardInterrupt):
                problem.args = (f"stopped; everything was made, and this uploads it: {again}",)
                raise
            raise BridgeError(
                f"the upload to {self.repository} failed ({reason(problem)}); everything was made, and this uploads "
                f"it: {again}"
            ) from problem
        also = "; its own model card was kept" if keeps_card else " with a model card"
        return f"uploaded {len(files)} file{'s' * (len(files) != 1)} to https://huggingface.co/{self.repository}{also}"

    def _commit(self, files: dict[str, Path], card: str) -> bool:
        """Make the repository, if it is missing, and commit; returns whether the card that it had was kept."""
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        api.create_repo(self.repository, private=self.private or None, exist_ok=True)
        adds = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        has_card = api.file_exists(self.repository, CARD)
        path = Path(api.hf_hub_download(self.repository, CARD)) if has_card else None
        keeps_card = path is not None and MARK not in path.read_text(encoding="utf-8", errors="replace")
        if not keeps_card:
            adds.append(CommitOperationAdd(CARD, card.encode()))
        api.create_commit(self.repository, adds, commit_message="Upload by gguf-bridge")
        return keeps_card

    def _by_hand(self, result: CommandReport, card: str) -> str:
        """The commands that upload everything; the card is written next to the result for them."""
        repository = f"{self.repository} --private" if self.private else self.repository
        first = result.outputs[0]
        what = [str(first), "." if isinstance(result, FolderReport) else first.name]
        if len(result.outputs) > 1:
            patterns = dict.fromkeys(re.sub(r"-\d{5}-of-", "-*-of-", file.name) for file in result.outputs)
            what = [str(first.parent), ".", *(word for p in patterns for word in ("--include", p))]
        card_file = first.with_name(f"{first.name}.{CARD}")
        write_text(card_file, card)
        return " && ".join(f"hf upload {repository} {shlex.join(words)}" for words in (what, [str(card_file), CARD]))
