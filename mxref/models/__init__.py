"""Language models of the transformers library with mxref's arithmetic: swap it in, and measure what it costs.

`pip install 'mxref[models]'`; importing this package does not import transformers.
"""

from mxref.models.evaluate import evaluate
from mxref.models.layers import ExpertsWeights, InputScales, MXExperts, MXLinear
from mxref.models.load import load
from mxref.models.report import CONVENTIONS, EvaluationReport, EvaluationRow
from mxref.models.swap import QuantizedWeights, quantize_weights, quantized

__all__ = [
    "CONVENTIONS",
    "EvaluationReport",
    "EvaluationRow",
    "ExpertsWeights",
    "InputScales",
    "MXExperts",
    "MXLinear",
    "QuantizedWeights",
    "evaluate",
    "load",
    "quantize_weights",
    "quantized",
]
