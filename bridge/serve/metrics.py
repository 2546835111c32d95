"""Counts of a server, in the text format of Prometheus (version 0.0.4)."""

from bisect import bisect_left
from collections import Counter

from bridge.serve.engine import Engine

_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds


class Metrics:
    """`requests` by path and status; times to the first token."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def first_token(self, seconds: float) -> None:
        """Note how long a request waited for its first token."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def text(self, engine: Engine) -> str:
        batch = engine.batch
        lines = ["# TYPE gguf_bridge_requests_total counter"]
        lines += [
            f'gguf_bridge_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        for name, kind, what, value in (
            ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", batch.prompt_tokens),
            ("prompt_tokens_kept_total", "counter", "Tokens of prompts whose keys and values were there already.",
             engine.kept_tokens),
            ("generated_tokens_total", "counter", "Tokens of replies.", engine.generated_tokens),
            ("guessed_tokens_total", "counter", "Tokens that were guessed, of replies that have ended.",
             batch.guessed_tokens),
            ("guessed_tokens_right_total", "counter", "Of these, those that were drawn.", batch.right_tokens),
            ("steps_total", "counter", "Passes over the weights for a token of each running sequence.", batch.steps),
            ("cancelled_total", "counter", "Sequences whose client went.", engine.cancelled),
            ("sequences_running", "gauge", "Sequences that have a context.", batch.active),
            ("sequences_open", "gauge", "Sequences that clients wait for.", len(engine.open)),
        ):  # fmt: skip
            full = f"gguf_bridge_{name}"
            lines += [f"# HELP {full} {what}", f"# TYPE {full} {kind}", f"{full} {value}"]
        name = "gguf_bridge_first_token_seconds"
        lines += [f"# HELP {name} Time from a request to its first token.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        lines += [f"{name}_sum {self._sum:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"
