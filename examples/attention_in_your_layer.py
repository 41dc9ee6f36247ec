"""Forgetting Attention in a layer of one's own: a small causal model of bytes, without positions, trained on a file.

    python examples/attention_in_your_layer.py --text FILE --steps 200

A line on stderr says which kernel runs and why: plain PyTorch on a CPU, Triton on a GPU.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from fox_kernels import forgetting_attention
from torch import nn

TEXT = Path(__file__).parent / "data" / "train" / "james-the-aspern-papers.txt"


class ForgettingLayer(nn.Module):
    """x + W_o attention(q, k, v, log f), with 8 query heads on 2 key/value heads and a gate for each query head."""

    def __init__(self, width: int, heads: int = 8, kv_heads: int = 2):
        super().__init__()
        self.shapes = [heads, kv_heads, kv_heads]
        self.norm, self.gate = nn.RMSNorm(width), nn.Linear(width, heads)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * (width // heads), bias=False)
        nn.init.constant_(self.gate.bias, 5.0)  # sigmoid(5): a half-life of 103 tokens; sigmoid(0) would be one token
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).unflatten(-1, (sum(self.shapes), -1)).split(self.shapes, dim=2)  # (B, T, heads, D)
        log_f = F.logsigmoid(self.gate(y).float())  # (B, T, H), float32, <= 0
        o = forgetting_attention(q, k, v, log_f, cu_seqlens=cu_seqlens, sink=1)
        return x + self.out(o.flatten(2))  # type: ignore[union-attr]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT, help="a file to learn")
    parser.add_argument("--steps", type=int, default=201)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    data = torch.tensor(list(options.text.read_bytes()))
    embed, layer, head = nn.Embedding(256, 128), ForgettingLayer(128), nn.Linear(128, 256)
    optimizer = torch.optim.AdamW([*embed.parameters(), *layer.parameters(), *head.parameters()], lr=3e-3)
    documents = torch.tensor([0, 100, 256], dtype=torch.int32)  # two documents in a row: neither sees the other
    for step in range(options.steps):
        row = data[int(torch.randint(len(data) - 257, ())) :][:257]
        loss = F.cross_entropy(head(layer(embed(row[None, :-1]), documents))[0], row[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:4}  loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
