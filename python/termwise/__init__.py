"""Attention variants, their recurrent states, and spectra of models.

    >>> import numpy as np, termwise
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4), dtype=np.float32)   # [batch, time, heads, dimension]
    >>> y = termwise.attention(q, k, v, "taylor=0..4 norm=l2")
    >>> y.shape, y.dtype
    ((1, 8, 2, 4), dtype('float32'))

A variant is given by a variant string, the same as on the command line and in checkpoints. ``termwise.presets()`` lists the named ones. Arrays are
``[batch, time, heads, dimension]``, as in FlashAttention and flash-linear-attention. The fused engine computes float32, the reference float64.

``termwise.torch`` provides the same for PyTorch tensors, with gradients. ``termwise.hf`` analyzes and changes Transformers models. Neither is imported by
``import termwise``.
"""

from ._attention import Extra, Layer, State, attention, attention_grad
from ._commands import atlas, audit, convert, frontier, reproduce, separation, sweep, train
from ._core import Variant, __version__, get_threads, set_threads
from ._errors import BusyError, Error, FileError, InputError, MissingFileError, OutOfMemoryError, RunError
from ._model import GenerationError, Model, load
from ._results import Result
from ._settings import DataSettings, Settings

__all__ = [
    "BusyError",
    "DataSettings",
    "Error",
    "Extra",
    "FileError",
    "GenerationError",
    "InputError",
    "Layer",
    "MissingFileError",
    "Model",
    "OutOfMemoryError",
    "Result",
    "RunError",
    "Settings",
    "State",
    "Variant",
    "__version__",
    "atlas",
    "attention",
    "attention_grad",
    "audit",
    "convert",
    "frontier",
    "get_threads",
    "load",
    "presets",
    "reproduce",
    "separation",
    "set_threads",
    "sweep",
    "train",
]


def presets() -> dict[str, Variant]:
    """Return the named variants.

    Returns
    -------
    dict of str to Variant
        Variants by name.

    Examples
    --------
    >>> import termwise
    >>> termwise.presets()["softmax"]
    Variant("exp over=sum")
    """
    return {name: Variant(text) for name, text in Variant.presets()}
