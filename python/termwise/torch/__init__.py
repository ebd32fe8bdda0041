"""Attention for PyTorch tensors, with gradients.

    y = termwise.torch.attention(q, k, v, "taylor=0..4 norm=l2")          # [batch, time, heads, dimension]

On the CPU it is an operator, ``torch.ops.termwise.attention``, for which ``torch.compile`` needs no graph break. It has gradients of q, k, v, gate logits and parameters. Contiguous
float32 tensors are not copied. bfloat16 and float16 are converted to float32 and back. float64 is computed by the reference. :class:`Attention` is a module with the projections and
parameters of a variant.

Tensors on other devices are computed by :mod:`termwise.torch.engine`, which consists of PyTorch operations; ``engine="torch"`` selects it on any device. :class:`Model` is a complete
model of any family, and :mod:`termwise.torch.train` trains one on one or several devices.
"""

from ._attention import Attention, attention
from .model import Model

__all__ = ["Attention", "Model", "attention"]
