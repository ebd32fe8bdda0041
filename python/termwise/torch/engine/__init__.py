"""The algebra of attention in plain torch operations: any device that PyTorch knows, gradients of everything, memory linear in T.

    y_t = P_t ⊙ N( O_t · (1/D_t) · Σ_{s visible from t}  M_ts · w_c(x_ts) · I_s · u_s )

The way of a call, a file for each stretch of it:

``parts``      what the layer is made of, as the Rust side has parsed it
``prepare``    q, k, v → what meets in scores: convolution, norm, RoPE, projection, φ; gates and decays
``kernels``    w(x), also for long series
``naive``      the sums over keys as the formula has them, T×T: for reading and for tests
``blocked``    the same by blocks of queries, computed again in the backward pass; ``states``: far keys through their state
``flex``       the same by FlexAttention, where weights are not negative
``epilogue``   denominator, gates, norm

Everything but ``blocked`` is differentiated by autograd.
"""

from .attention import attend

__all__ = ["attend"]
