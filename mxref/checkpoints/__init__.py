"""Checkpoints of block-scaled weights, as the field's tools write them: read into one form, inspected, converted.

`pip install 'mxref[models]'`; importing this package does not import safetensors.
"""

from mxref.checkpoints.checkpoint import Checkpoint, QuantizedWeight, load_checkpoint
from mxref.checkpoints.convert import Conversion, convert_checkpoint
from mxref.checkpoints.dialects import DIALECTS, Layout
from mxref.checkpoints.files import CheckpointError, UnreadableError
from mxref.checkpoints.inspection import Finding, Inspection, inspect_checkpoint
from mxref.checkpoints.recode import Change, Loss

__all__ = [
    "DIALECTS",
    "Change",
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "Finding",
    "Inspection",
    "Layout",
    "Loss",
    "QuantizedWeight",
    "UnreadableError",
    "convert_checkpoint",
    "inspect_checkpoint",
    "load_checkpoint",
]
