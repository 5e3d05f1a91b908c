"""Checkpoints of block-scaled weights, as the field's tools write them: read into one form, and inspected.

`pip install 'mxref[models]'`; importing this package does not import safetensors.
"""

from mxref.checkpoints.checkpoint import Checkpoint, QuantizedWeight, load_checkpoint
from mxref.checkpoints.dialects import DIALECTS, Layout
from mxref.checkpoints.files import CheckpointError
from mxref.checkpoints.inspection import Finding, Inspection, inspect_checkpoint

__all__ = [
    "DIALECTS",
    "Checkpoint",
    "CheckpointError",
    "Finding",
    "Inspection",
    "Layout",
    "QuantizedWeight",
    "inspect_checkpoint",
    "load_checkpoint",
]
