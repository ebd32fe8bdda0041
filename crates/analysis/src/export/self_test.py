"""The self-test: weights and inputs are sines, outputs and gradients are compared with the values above."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from .module import Attention
from .reference import GRADIENT_SIZE, GRADIENTS, PHASE, SIZES, Y


def sines(shape: tuple[int, ...], phase: float) -> Tensor:
    return torch.sin(1.3 * torch.arange(math.prod(shape), dtype=torch.float64) + phase).reshape(shape)


def self_test(dtype: torch.dtype, tolerance: float) -> float:
    """Compares all forms and all gradients with the reference values; the largest relative error."""
    attention = Attention(**SIZES).double()
    for n, (name, parameter) in enumerate(sorted(attention.named_parameters())):
        # Weights of norms and series are around 1, others around 0.
        around = float(name.endswith(("norm.weight", "coefficients")))
        parameter.data = around + 0.5 * sines(parameter.shape, PHASE + n)
    attention = attention.to(dtype)
    expected = torch.tensor(Y, dtype=torch.float64)
    x = sines((1, len(Y), SIZES["hidden"]), PHASE).to(dtype).requires_grad_()
    worst = 0.0
    for form in (attention, attention.parallel, lambda x: attention.chunk(x, 4), attention.recurrent):
        y = form(x)
        worst = max(worst, float((y[0].detach().double() - expected).norm() / expected.norm()))
        attention.zero_grad()
        x.grad = None
        (y * sines(y.shape, 2.0).to(dtype)).sum().backward()
        of = {"x": x, **dict(attention.named_parameters())}
        for name, value in GRADIENTS.items():
            # A parameter that cancels before it reaches y has none.
            g = torch.zeros_like(of[name]).double() if of[name].grad is None else of[name].grad.double()
            size = g.norm() * math.sqrt(g.numel() / 2) + GRADIENT_SIZE
            worst = max(worst, abs(float((g * sines(g.shape, 1.0)).sum()) - value) / float(size))
    if not worst < tolerance:
        sys.exit(f"{dtype}: the largest relative error is {worst:.1e}, more than {tolerance:.0e}")
    return worst


if __name__ == "__main__":
    for dtype, tolerance in ((torch.float64, 1e-8), (torch.float32, 1e-5)):
        print(f"{dtype}: parallel, chunk and recurrent forms and their gradients agree with the reference, largest relative error {self_test(dtype, tolerance):.1e}")
