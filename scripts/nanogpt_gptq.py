"""Train a small character-level GPT, quantize its 61 linear layers, and print the cost of rounding and of GPTQ.

    python scripts/nanogpt_gptq.py [--train shakespeare_train.txt] [--validate shakespeare_val.txt]

Every head's query, key and value are Linear layers of their own: 4 blocks of 4 x 3 + 3, and the output layer. Inputs
are gathered by forward hooks on 10 batches of the training text. The loss is the mean over the whole validation text,
cut into windows one after the other, the same for every line of the table.
"""

import argparse
import copy
import math
import os
import time
from pathlib import Path

import torch
from benchlib import ROOT, head, line, parser
from torch import nn
from torch.nn import functional

from bridge.quantize import gptq

TEXT = Path(os.environ.get("BRIDGE_SHARED", ROOT.parent / "shared")) / "text"
LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 64, 64, 32


class Head(nn.Module):
    """One head of causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x), is_causal=True)


class Block(nn.Module):
    """Attention and a feed-forward network, each on the normed input and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(HEADS))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.before(x)
        x = x + self.mix(torch.cat([head(normed) for head in self.heads], -1))
        return x + self.down(functional.relu(self.up(self.between(x))))


class CharacterGPT(nn.Module):
    """Characters int [batch, time] -> logits [batch, time, characters]."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.embedding(x) + self.position(position))))


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    texts = [path.read_text(encoding="utf-8") for path in (options.train, options.validate)]
    known = {c: i for i, c in enumerate(sorted(set("".join(texts))))}
    train, validation = (torch.tensor([known[c] for c in text]) for text in texts)
    model = CharacterGPT(len(known))
    begun = time.perf_counter()
    fit(model, train, options.steps)
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    count = sum(p.numel() for p in model.parameters())
    seconds = time.perf_counter() - begun
    print(f"{count} parameters, {linears} linear layers, {options.steps} steps in {seconds:.0f} s\n")
    batches = [windows(train, at)[0] for at in starts(train, 10)]
    floats = loss(model, validation)
    print(head("bits", "columns in a group", "method", "loss", "perplexity", "more"))
    line("float", "", "", f"{floats:.4f}", f"{math.exp(floats):.3f}", "")
    for bits in options.bits:
        size = -1 if bits == 8 else 32
        for name, damping in (("RTN", math.inf), ("GPTQ", 0.01)):
            quantized = copy.deepcopy(model)
            done = gptq(quantized, batches, bits=bits, group_size=size, symmetric=False, damping=damping)
            assert len(done) == linears
            lost = loss(quantized, validation)
            results = f"{lost:.4f}", f"{math.exp(lost):.3f}", f"{math.expm1(lost - floats):+.3%}"
            line(bits, size if size > 0 else "all", name, *results)


def starts(text: torch.Tensor, batches: int) -> torch.Tensor:
    """Where random windows begin, int [batches, BATCH]."""
    return torch.randint(len(text) - CONTEXT, (batches, BATCH))


def windows(text: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the characters that follow them, int [windows, CONTEXT] each."""
    both = text[at[:, None] + torch.arange(CONTEXT + 1)]
    return both[:, :-1], both[:, 1:]


def fit(model: nn.Module, text: torch.Tensor, steps: int) -> None:
    """Train on random windows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for at in starts(text, steps):
        inputs, expected = windows(text, at)
        lost = functional.cross_entropy(model(inputs).flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss(model: nn.Module, text: torch.Tensor) -> float:
    """Mean cross-entropy in nats of every character of the text, in windows one after the other."""
    total = count = 0.0
    for at in torch.arange(0, len(text) - CONTEXT, CONTEXT).split(256):
        inputs, expected = windows(text, at)
        total += float(functional.cross_entropy(model(inputs).flatten(0, 1), expected.flatten(), reduction="sum"))
        count += expected.numel()
    return total / count


def parse() -> argparse.Namespace:
    options = parser(__doc__)
    for name in ("train", "validate"):
        default = TEXT / f"shakespeare_{'val' if name == 'validate' else name}.txt"
        options.add_argument(f"--{name}", type=Path, default=default, metavar="FILE", help="default: %(default)s")
    options.add_argument("--steps", type=int, default=1500, metavar="N", help="training steps; default: %(default)s")
    options.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3], metavar="N", help="default: 8 4 3")
    options.add_argument("--seed", type=int, default=1337, metavar="N", help="default: %(default)s")
    return options.parse_args()


if __name__ == "__main__":
    main()
