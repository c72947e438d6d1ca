"""Image classification: its loss, and the metric that it is judged by."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def loss(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Mean cross-entropy of logits (N, C) against labels (N,) int64, a share `label_smoothing` of each target spread
    evenly over all classes (Szegedy et al., arXiv 1512.00567, section 7). In float32 whatever the logits' dtype."""
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """(N,) bool: the largest logit is the label's, and all logits are finite."""
    return (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)
