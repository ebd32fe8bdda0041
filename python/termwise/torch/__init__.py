"""Attention for PyTorch tensors, with gradients.

    y = termwise.torch.attention(q, k, v, "taylor=0..4 norm=l2")          # [batch, time, heads, dimension]

Two operators, ``termwise::attention`` and ``termwise::attention_backward``, with shapes for ``torch.compile`` and gradients of q, k, v, logits of gates
and parameters. Contiguous float32 tensors are read where they are; bfloat16 and float16 are converted to float32 and y back; float64 is computed by
the reference, so that ``torch.autograd.gradcheck`` can be asked. :class:`Attention` is a module with the projections and parameters that a variant
needs.

Tensors on other devices are computed by :mod:`termwise.torch.engine`, plain torch operations by blocks; ``engine="torch"`` asks for it anywhere. :class:`Model` is a whole model
of any family, and :mod:`termwise.torch.train` trains one, on one device or many.
"""

from ._attention import Attention, attention
from .model import Model

__all__ = ["Attention", "Model", "attention"]
