"""What a kernel says that it does not take, found by asking it about every format and recipe, without running it."""

from collections.abc import Iterator

import torch

from mxref.conformance.cases import cases
from mxref.formats import BLOCK_FORMATS
from mxref.recipes import RECIPES
from mxref.registry import AskingFailed, Kernel, ask


def refusals(kernel: Kernel) -> list[str]:
    """The sentences of `kernel.accepts`, each once: for every block format with every named recipe that fits it, or, of ops
    without recipes, for the first case of every format."""
    found: dict[str, None] = {}
    for args, kwargs in _calls(kernel.op):
        try:
            reason = ask(kernel, "accepts", *args, **kwargs)
        except AskingFailed as problem:  # a fault of the kernel's, to be listed like any other
            reason = str(problem)
        if reason is not None:
            found[reason] = None
    return list(found)


def _calls(op: str) -> Iterator[tuple[tuple, dict]]:
    if op in ("quantize", "qdq"):
        for format in BLOCK_FORMATS.values():
            for recipe in RECIPES.values():
                if recipe.fits(format):
                    yield (torch.zeros(1, format.block_size), format.name), {"recipe": recipe.name}
        return
    seen = set()
    for case in cases(op):
        if case.raises is None and case.format not in seen:
            seen.add(case.format)
            yield case.arguments()
