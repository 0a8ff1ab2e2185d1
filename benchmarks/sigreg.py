"""What do the two forms of SIGReg see: soma's, over the directions of one state, and the one over samples?

The first table is the statistic (without the coefficient) of states that are made by hand, its mean and standard
deviation over draws of states and directions. The second is a small
training: counts of cells of 8 types, two thinned views of each, an MLP, and a loss of agreement alone, or with one of
the two. Without either, all cells end at one point, which agrees best.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from scforge.models.components import SIGReg as OverSamples
from scforge.soma.v1.torch import SIGReg as PerToken
from scforge.soma.v1.torch import SIGRegConfig

WIDTH, TOKENS = 512, (8, 128)
WEIGHT = 0.02


def states(seed: int) -> dict[str, torch.Tensor]:
    """Return states by what they are."""
    torch.manual_seed(seed)
    normal = torch.randn(*TOKENS, WIDTH)
    line = torch.randn(*TOKENS, 1) * torch.randn(WIDTH)
    return {
        "isotropic normal": normal,
        "the same after a layer norm": F.layer_norm(normal, (WIDTH,)),
        "all equal, after a layer norm": F.layer_norm(torch.randn(WIDTH), (WIDTH,)).expand(*TOKENS, WIDTH),
        "on one line, after a layer norm": F.layer_norm(line, (WIDTH,)),
        "isotropic normal, doubled": 2 * normal,
        "zero": torch.zeros(*TOKENS, WIDTH),
    }


def print_statistics(draws: int) -> None:
    forms = (PerToken(SIGRegConfig(coefficient=1.0)), OverSamples(256))
    values: dict[str, list[list[float]]] = {}
    for seed in range(draws):
        for name, x in states(seed).items():
            noise = torch.randn(WIDTH, 256)
            pair = [form.compute(x.reshape(-1, WIDTH), noise).item() for form in forms]
            values.setdefault(name, []).append(pair)
    print(f"| {TOKENS[0]} x {TOKENS[1]} states of {WIDTH} dimensions | soma, per token | over samples |")
    print("|---|---:|---:|")
    for name, pairs in values.items():
        table = torch.tensor(pairs)
        shown = [f"{m:,.2f} ± {s:,.2f}" for m, s in zip(table.mean(dim=0), table.std(dim=0), strict=True)]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)


def cells(seed: int, per_type: int = 32, genes: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts of cells of 8 types, and their types."""
    generator = torch.Generator().manual_seed(seed)
    profiles = torch.exp(torch.randn(8, genes, generator=generator)) * 2
    types = torch.arange(8).repeat_interleave(per_type)
    return torch.poisson(profiles[types], generator=generator), types


def thinned(counts: torch.Tensor) -> torch.Tensor:
    """Return log1p of half of the counts, drawn anew."""
    return torch.log1p(torch.binomial(counts, torch.full_like(counts, 0.5)))


def train(regularizer: Callable | None, seed: int, *, norm: bool, steps: int) -> tuple[float, float, float]:
    """Return mean cosine, mean standard deviation, and accuracy of the nearest other cell's type."""
    torch.manual_seed(seed)
    counts, types = cells(seed)
    model = nn.Sequential(nn.Linear(counts.shape[1], 128), nn.GELU(), nn.Linear(128, 32))
    if norm:
        model.append(nn.LayerNorm(32, elementwise_affine=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        views = torch.stack([model(thinned(counts)) for _ in range(2)])
        loss = (views - views.mean(dim=0)).square().mean()
        if regularizer is not None:
            loss = loss + WEIGHT * regularizer(views)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        z = model(torch.log1p(counts / 2))
    unit = F.normalize(z, dim=1)
    cosines = (unit @ unit.T)[~torch.eye(len(z), dtype=torch.bool)].mean()
    distances = torch.cdist(z, z).fill_diagonal_(torch.inf)
    right = (types[distances.argmin(dim=1)] == types).float().mean()
    return cosines.item(), z.std(dim=0).mean().item(), right.item()


def print_trainings(seeds: int, steps: int) -> None:
    per_token = PerToken(SIGRegConfig(coefficient=1.0))
    regularizers = {
        "agreement alone": None,
        "with soma's, per token": per_token,
        "with that over samples": OverSamples(256),
    }
    print(
        "\n| training | layer norm at the end | mean cosine of cells | standard deviation | nearest cell of its type |"
    )
    print("|---|---|---:|---:|---:|")
    for name, regularizer in regularizers.items():
        for norm in (False, True):
            runs = torch.tensor([train(regularizer, seed, norm=norm, steps=steps) for seed in range(seeds)])
            cosine, spread, right = runs.mean(dim=0).tolist()
            print(f"| {name} | {'yes' if norm else 'no'} | {cosine:.2f} | {spread:.3f} | {right:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=250)
    args = parser.parse_args()
    print_statistics(args.draws)
    print_trainings(args.seeds, args.steps)


if __name__ == "__main__":
    main()
