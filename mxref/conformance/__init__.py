"""Conformance: does a backend keep what it promises, which nearly always is the bits of the reference?

    mxref verify triton --device cuda          # kernels against the reference on the CPU
    mxref verify reference --device cuda       # the reference itself on another device

Expected values are the CPU reference's, which the tests hold to independent sources.

| file | what it decides |
|---|---|
| `inputs.py` | the values that tell right from wrong |
| `cases.py` | what is asked of every backend, op by op |
| `wrong.py` | calls that must be refused |
| `contracts.py` | what a kernel can promise, with proofs |
| `failure.py` | what a failure shows |
| `known.py` | which failures are known |
| `report.py`, `html.py` | what a run found: records, text, JSON, a page |
| `runner.py`, `processes.py` | running cases, in processes that may die |
| `settings.py` | what of the process a kernel has to leave as it is |
| `refusals.py` | what a kernel says it does not take |
"""

from mxref.conformance.cases import Case, cases
from mxref.conformance.failure import Failure
from mxref.conformance.html import html_page
from mxref.conformance.known import read_known_failures
from mxref.conformance.report import ConformanceReport, ConformanceRow
from mxref.conformance.runner import verify

__all__ = [
    "Case",
    "ConformanceReport",
    "ConformanceRow",
    "Failure",
    "cases",
    "html_page",
    "read_known_failures",
    "verify",
]
