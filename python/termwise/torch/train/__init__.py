"""Training with PyTorch: ``torchrun … -m termwise.torch.train settings.toml``.

The run is that of ``termwise train``: its settings, order of data, schedule, metrics, folder and checkpoints, by the same code in Rust. Python does what an engine does: gradients,
updates and losses (``learner``), and words between processes (``collective``). A run can go on with the other engine, and with another number of processes.
"""

from .learner import How, Learner

__all__ = ["How", "Learner"]
