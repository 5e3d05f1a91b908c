"""What `mxref_text.yaml` calls: documents of the text that comes with mxref, and what each contributes to the metrics."""

import re
from pathlib import Path
from typing import Any


def chapters(**_: Any) -> dict:
    """The text cut before every chapter heading, as the `test` split of a data set with one column, `page`."""
    from datasets import Dataset

    from mxref.models.embedded import TEXT_FILE

    text = Path(TEXT_FILE).read_text(encoding="utf-8")
    pages = re.split(r"(?m)^(?=chapter )", text, flags=re.IGNORECASE)
    return {"test": Dataset.from_dict({"page": [page for page in pages if page.strip()]})}


def process_results(doc: dict[str, str], results: list[float]) -> dict[str, tuple[float, int]]:
    """(log-likelihood, weight) for each metric: words are runs of non-space, bytes those of UTF-8."""
    (loglikelihood,) = results
    words, size = len(doc["page"].split()), len(doc["page"].encode())
    return {
        "word_perplexity": (loglikelihood, words),
        "byte_perplexity": (loglikelihood, size),
        "bits_per_byte": (loglikelihood, size),
    }
