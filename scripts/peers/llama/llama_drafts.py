"""llama.cpp's replies with a drafter, through the server inside the xllamacpp wheel: the peer of `--draft`."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Drafted(NamedTuple):
    """A greedy reply, and how many tokens were guessed and right."""

    text: str
    guessed: int
    right: int


def reply(model: Path, prompt: list[int], tokens: int, drafter: Path | None = None, kind: str = "") -> Drafted:
    """A reply to token ids; `kind`: of the drafter, "EAGLE3", "MTP" (also Gemma 4's assistants) or "DFLASH".

    Three tokens are guessed at a time, whatever their probability.
    """
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 256, 1, False
    if drafter is not None:
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
        params.speculative.draft.mparams.path = str(drafter)
        params.speculative.draft.n_max, params.speculative.draft.p_min = 3, 0.0
    answer: Any = xllamacpp.Server(params).handle_completions(
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    )
    answer = json.loads(answer) if isinstance(answer, str) else answer
    timings = answer["timings"]
    return Drafted(answer["choices"][0]["text"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
