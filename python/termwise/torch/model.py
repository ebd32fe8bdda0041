"""Language models in PyTorch. Tensors have the names of checkpoints.

    x = scale·embedding(ids)
    for each block:  h = norm(x);  x += after(output(attention(qkv(h), gates(h))))
                     h = norm(x);  x += after(down(act(gate(h))·up(h)))
    logits = cap(lm_head(norm(x)))

The differences between families come from Rust as plain data (``_core.model_of_config``), one description for all engines.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import _core
from .._attention import Layer
from .engine import attend
from .engine.kernels import without_autocast

#: Largest number of logits at a time. More are computed in pieces, which the backward pass recomputes.
_LOGITS = 1 << 26


@dataclass(frozen=True)
class Outline:
    """The parts of a model around attention."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    tied: bool
    attention_norms: tuple[str, str]
    mlp_norms: tuple[str, str]
    norm_offset: float
    norm_eps: float
    activation: str
    fused: bool
    embedding_scale: float
    logit_cap: float | None
    #: Name, shape, and whether it is a matrix.
    tensors: tuple[tuple[str, tuple[int, ...], bool], ...]

    @classmethod
    def read(cls, text: str) -> Outline:
        found: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(text).items()}
        found["tensors"] = tuple((name, tuple(shape), matrix) for name, shape, matrix in found["tensors"])
        return cls(**found)


def _linear(owner: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, owner.weight, getattr(owner, "bias", None))  # type: ignore[arg-type]


def _grow(root: nn.Module, name: str, shape: tuple[int, ...], device: Any) -> None:
    """Add a parameter with a dotted name to a tree of modules."""
    *places, last = name.split(".")
    for place in places:
        if not hasattr(root, place):
            root.add_module(place, nn.Module())
        root = getattr(root, place)
    root.register_parameter(last, nn.Parameter(torch.zeros(shape, device=device, dtype=torch.float32)))


class Block(nn.Module):
    """One layer."""

    def __init__(self, outline: Outline, layer: Layer, mode: str) -> None:
        super().__init__()
        self.outline, self.layer, self.mode = outline, layer, mode

    def _norm(self, name: str, x: Tensor) -> Tensor:
        if not name:
            return x
        o = self.outline
        return _rms_norm(x, getattr(self, name).weight, o.norm_offset, o.norm_eps)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """x [B, T, C]"""
        o = self.outline
        before, after = o.attention_norms
        x = x + self._norm(after, self._attention(self._norm(before, x), lengths))
        before, after = o.mlp_norms
        return x + self._norm(after, self._mlp(self._norm(before, x)))

    def _attention(self, h: Tensor, lengths: Tensor | None) -> Tensor:
        o, own = self.outline, cast(Any, self.self_attn)
        widths = [o.heads * o.head_dim, o.kv_heads * o.head_dim, o.kv_heads * o.head_dim]
        parts = _linear(own.qkv_proj, h).split(widths, -1) if o.fused else [_linear(p, h) for p in (own.q_proj, own.k_proj, own.v_proj)]  # type: ignore[union-attr]
        q, k, v = (part.unflatten(-1, (-1, o.head_dim)) for part in parts)
        y = attend(self.layer, q, k, v, self._extras(h), lengths=lengths, mode=self.mode)
        return _linear(own.o_proj, y.flatten(2))  # type: ignore[arg-type,union-attr]

    def _extras(self, h: Tensor) -> dict[str, Tensor]:
        found = {}
        for extra in self.layer.extras:
            value: Any = self.self_attn
            for part in extra.tensor.split("."):
                value = getattr(value, part)
            if extra.logits:
                # Gates multiply sums over many positions: float32 also under autocast.
                with without_autocast(h):
                    found[extra.name] = F.linear(h.to(value.weight.dtype), value.weight, getattr(value, "bias", None))
            else:
                found[extra.name] = value + self.outline.norm_offset if extra.name in ("q_norm", "k_norm") else value
        return found

    def _mlp(self, h: Tensor) -> Tensor:
        own: Any = self.mlp
        gate, up = _linear(own.gate_up_proj, h).chunk(2, -1) if self.outline.fused else (_linear(own.gate_proj, h), _linear(own.up_proj, h))
        gate = F.silu(gate) if self.outline.activation == "silu" else F.gelu(gate, approximate="tanh")
        return _linear(own.down_proj, gate * up)


def _rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """Computed in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y * (weight + offset)


class Model(nn.Module):
    """A causal language model in PyTorch, of any family of termwise except GPT-NeoX and StableLM.

    ``Model(config)`` has zero weights; :meth:`load` reads the weights of a model, a run or a checkpoint.

    Parameters
    ----------
    config : str
        Content of a ``config.json``.
    positions : int, optional
        Longest sequence. Default: ``max_position_embeddings``.
    device
        Of the parameters.
    mode : str
        As for :func:`attention`.
    checkpointing : bool
        Recompute blocks in the backward pass instead of keeping their activations.
    """

    def __init__(self, config: str, *, positions: int | None = None, device: Any = None, mode: str = "parallel", checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        positions = positions or json.loads(config).get("max_position_embeddings", 2048)
        text, layers = _core.model_of_config(config, positions)
        self.outline = Outline.read(text)
        # Tensors are in the order of a checkpoint. Each layer is a module, so layers can be distributed over devices.
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block(self.outline, Layer._of(config, index, positions, core), mode) for index, core in enumerate(layers))
        for name, shape, _ in self.outline.tensors:
            _grow(self, name, shape, device)

    @classmethod
    def load(cls, name: str | os.PathLike[str], **options: Any) -> Model:
        """Load a model by a name that :func:`termwise.load` accepts."""
        core = _core.load_model(os.fspath(name), None)
        model = cls(core.config, **options)
        with torch.no_grad():
            for tensor, parameter in model.named_parameters():
                room = np.empty(parameter.shape, np.float32)
                core.copy_tensor(tensor, room)
                parameter.copy_(torch.from_numpy(room))
        return model

    def hidden(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the hidden states before the output projection, [B, T, C]."""
        o, inner = self.outline, self.model
        x = F.embedding(ids, inner.embed_tokens.weight)  # type: ignore[union-attr,arg-type]
        if o.embedding_scale != 1.0:
            x = x * o.embedding_scale
        for block in inner.layers:  # type: ignore[union-attr]
            # Only the input of a block is kept; the backward pass recomputes the rest.
            x = checkpoint(block, x, lengths, use_reentrant=False) if self.checkpointing and torch.is_grad_enabled() else block(x, lengths)
        return _rms_norm(x, inner.norm.weight, o.norm_offset, o.norm_eps)  # type: ignore[union-attr,arg-type]

    def _logits(self, h: Tensor) -> Tensor:
        weight = self.model.embed_tokens.weight if self.outline.tied else self.lm_head.weight  # type: ignore[union-attr]
        logits = F.linear(h, weight).float()  # type: ignore[arg-type]
        cap = self.outline.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(self, ids: Tensor, labels: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V]; with labels, the loss of every position in nats, [B, T]. Positions with the label -100 have a loss of 0."""
        h = self.hidden(ids, lengths)
        if labels is None:
            return self._logits(h)
        h, wanted = h.flatten(0, 1), labels.flatten()
        step = max(1, _LOGITS // self.outline.vocabulary)
        if h.shape[0] <= step:
            return self._losses(h, wanted).view(labels.shape)
        pieces = [checkpoint(self._losses, a, b, use_reentrant=False) for a, b in zip(h.split(step), wanted.split(step), strict=True)]
        return torch.cat(pieces).view(labels.shape)  # type: ignore[arg-type]

    def _losses(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(h), labels, reduction="none", ignore_index=-100)
