"""Conformance: does a backend give the bits of the reference? Cases, runner and report are three parts.

    mxref verify triton --device cuda          # kernels against the reference on the CPU
    mxref verify reference --device cuda       # the reference itself on another device

Expected values are the CPU reference's, which the tests hold to independent sources.
"""

from mxref.conformance.cases import Case, cases
from mxref.conformance.report import ConformanceReport, ConformanceRow, Failure
from mxref.conformance.runner import verify

__all__ = ["Case", "ConformanceReport", "ConformanceRow", "Failure", "cases", "verify"]
