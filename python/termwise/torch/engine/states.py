"""The finite feature maps of polynomial kernels: x^n/n! = Φ_n(q)·Φ_n(k), Φ_n(x)_α = √(1/α!)·x^α over the C(d+n-1, n) distinct monomials of order n.

A monomial of order n is computed as one of order n-1 times a coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb

import torch
from torch import Tensor

from .parts import ScoreFn


def monomial_count(width: int, orders: Sequence[int]) -> int:
    """Number of monomials of these orders in ``width`` coordinates."""
    return sum(comb(width + n - 1, n) for n in orders)


@lru_cache(maxsize=32)
def _steps(width: int, order: int) -> tuple[list[int], list[int], list[float], list[tuple[int, int]]]:
    """For each monomial of an order: its parent of order - 1, the added coordinate, the factor; and its last coordinate with the exponent."""
    if order == 0:
        return [], [], [], [(0, 0)]
    before = _steps(width, order - 1)[3]
    parents, coordinates, factors, last = [], [], [], []
    for parent, (coordinate, count) in enumerate(before):
        for i in range(coordinate, width):
            times = count + 1 if i == coordinate else 1
            parents.append(parent)
            coordinates.append(i)
            # α! is multiplied by the new exponent of the coordinate.
            factors.append(times**-0.5)
            last.append((i, times))
    return parents, coordinates, factors, last


@lru_cache(maxsize=64)
def _table(width: int, order: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    parents, coordinates, factors, _ = _steps(width, order)
    return torch.tensor(parents, device=device), torch.tensor(coordinates, device=device), torch.tensor(factors, device=device, dtype=dtype)


def monomials(x: Tensor, orders: Sequence[int], weighed: bool = True) -> Tensor:
    """Φ of these orders, concatenated, [..., rows]; with ``weighed=False`` x^α."""
    found = []
    phi = torch.ones_like(x[..., :1])
    for n in range(max(orders) + 1):
        if n > 0:
            parents, coordinates, factors = _table(x.shape[-1], n, x.device, x.dtype)
            phi = phi.index_select(-1, parents) * x.index_select(-1, coordinates)
            phi = phi * factors if weighed else phi
        if n in orders:
            found.append(phi)
    return torch.cat(found, -1)


def reading(score_fn: ScoreFn, q: Tensor, scale: float, coefficients: Tensor | None) -> Tensor:
    """a_n·scale^n·Φ_n(q), whose product with a state is Σ w(scale·q·k)·u; ``coefficients`` [..., 1, 1, orders] are learned ones."""
    assert score_fn.state is not None
    orders = [n for n, _ in score_fn.state]
    counts = torch.tensor([monomial_count(q.shape[-1], [n]) for n in orders], device=q.device)
    numbers = torch.tensor([a * scale**n for n, a in score_fn.state], device=q.device, dtype=q.dtype)
    if coefficients is not None:
        numbers = numbers * coefficients[..., 0, :]
    return monomials(q, orders) * numbers.repeat_interleave(counts, -1)
