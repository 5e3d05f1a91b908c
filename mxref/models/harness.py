"""Loaded checkpoints in EleutherAI's lm-eval: `pip install 'mxref[lm-eval]'`."""

import os
from pathlib import Path
from typing import Any

TASKS = Path(__file__).parent / "tasks"  # of mxref's own tasks, for lm-eval's `TaskManager(include_path=...)`


def harness_model(
    path: str | os.PathLike, *, tokenizer: str | os.PathLike | None = None, batch_size: int = 8, **loading: Any
):
    """The checkpoint at `path` as an lm-eval model (an `HFLM`), running its own scheme: see `mxref.models.load`.

    `tokenizer`: a directory, if `path` has no tokenizer. `loading`: further arguments of `load`. With a network every task
    of lm-eval runs on it; `mxref_text` in `TASKS` (word_perplexity, byte_perplexity, bits_per_byte) needs none. Raises
    what `load` raises, ValueError without a tokenizer, ImportError (naming the extra) without lm-eval.

        lm_eval.simple_evaluate(
            harness_model("checkpoint"), tasks=["mxref_text"], task_manager=TaskManager(include_path=str(TASKS))
        )
    """
    try:
        from lm_eval.models.huggingface import HFLM
    except ImportError as missing:
        raise ImportError("the harness is lm-eval: pip install 'mxref[lm-eval]'") from missing
    from mxref.models.load import load
    from mxref.models.sources import open_tokenizer

    tokenizer = open_tokenizer(path if tokenizer is None else tokenizer)
    model = load(path, **loading)
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=_longest(model))


def _longest(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
