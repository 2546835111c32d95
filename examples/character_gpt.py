"""Train a small GPT on characters and quantize its 61 linear layers: character_gpt.py TRAIN VALIDATE [STEPS [BITS ...]]

Printed are losses and perplexities of rounding and of GPTQ. Every head's query, key and value are Linear layers of
their own: 4 blocks of 4 x 3 + 3, and the output layer. Inputs are gathered by forward hooks on 10 batches of the
training text. The loss is the mean over the whole validation text, cut into windows one after the other.
"""

import copy
import math
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from bridge.quantize import gptq

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


def main(train_file: str, validation_file: str, steps: str = "1500", *bits: str) -> None:
    torch.manual_seed(1337)
    texts = [Path(file).read_text(encoding="utf-8") for file in (train_file, validation_file)]
    known = {c: i for i, c in enumerate(sorted(set("".join(texts))))}
    train, validation = (torch.tensor([known[c] for c in text]) for text in texts)
    model = CharacterGPT(len(known))
    fit(model, train, int(steps))
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {linears} linear layers, {steps} steps")
    batches = [windows(train, begin)[0] for begin in starts(train, 10)]
    floats = loss(model, validation)
    print(f"floats: loss {floats:.4f}, perplexity {math.exp(floats):.3f}")
    for width in map(int, bits or ("8", "4", "3")):
        size = -1 if width == 8 else 32  # columns in a group
        for name, damping in (("RTN", math.inf), ("GPTQ", 0.01)):
            quantized = copy.deepcopy(model)
            gptq(quantized, batches, bits=width, group_size=size, symmetric=False, damping=damping)
            lost = loss(quantized, validation)
            more = math.expm1(lost - floats)
            print(f"{width} bits, {name}: loss {lost:.4f}, perplexity {math.exp(lost):.3f}, {more:+.3%}")


def starts(text: torch.Tensor, batches: int) -> torch.Tensor:
    """Where random windows begin, int [batches, BATCH]."""
    return torch.randint(len(text) - CONTEXT, (batches, BATCH))


def windows(text: torch.Tensor, begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and the characters that follow them, int [windows, CONTEXT] each."""
    both = text[begins[:, None] + torch.arange(CONTEXT + 1)]
    return both[:, :-1], both[:, 1:]


def fit(model: nn.Module, text: torch.Tensor, steps: int) -> None:
    """Train on random windows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for begins in starts(text, steps):
        inputs, expected = windows(text, begins)
        lost = functional.cross_entropy(model(inputs).flatten(0, 1), expected.flatten())
        optimizer.zero_grad()
        lost.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss(model: nn.Module, text: torch.Tensor) -> float:
    """Mean cross-entropy in nats of every character of the text, in windows one after the other."""
    total = count = 0.0
    for begins in torch.arange(0, len(text) - CONTEXT, CONTEXT).split(256):
        inputs, expected = windows(text, begins)
        total += float(functional.cross_entropy(model(inputs).flatten(0, 1), expected.flatten(), reduction="sum"))
        count += expected.numel()
    return total / count


if __name__ == "__main__":
    main(*sys.argv[1:])
