"""The algebra of attention in PyTorch operations, for any device, with gradients of all inputs and memory linear in T.

    y_t = P_t ⊙ N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w_c(x_ts) · I_s · u_s )

The stages of a call, one file each:

``parts``      the parts of the layer, parsed in Rust
``prepare``    from q, k and v to the inputs of scores: convolution, norm, RoPE, projection, φ; gates and decays
``kernels``    w(x), also for long series
``naive``      the sums over keys as in the formula, T×T: for reading and for tests
``blocked``    the same in blocks of queries, recomputed in the backward pass; ``states``: keys through a recurrent state
``flex``       the same with FlexAttention, for non-negative weights
``epilogue``   denominator, gates, norm

Autograd differentiates everything except ``blocked``.
"""

from .attention import attend

__all__ = ["attend"]
