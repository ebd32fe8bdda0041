"""Training with PyTorch: ``torchrun … -m termwise.torch.train settings.toml``.

The code in Rust of ``termwise train`` provides settings, order of data, schedule, metrics, folder and checkpoints. Python computes gradients, updates and losses (``learner``) and
communicates between processes (``collective``). A run can be resumed with the other engine, and with another number of processes.
"""

from .learner import Learner, LearnerOptions

__all__ = ["Learner", "LearnerOptions"]
