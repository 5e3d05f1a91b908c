"""The adapter to lm-eval, where that is installed."""

import math
import sys

import pytest

pytest.importorskip("transformers")

from tiny_models import tiny_model, tiny_tokenizer

from mxref.models.harness import TASKS, harness_model


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3moe").save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "!"
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_the_text_that_comes_with_mxref_is_a_task_without_a_network(folder, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    model = harness_model(folder, batch_size=16)
    found = lm_eval.simple_evaluate(model, tasks=["mxref_text"], task_manager=manager, limit=1, bootstrap_iters=0)
    metrics = found["results"]["mxref_text"]
    assert metrics["bits_per_byte,none"] == pytest.approx(math.log2(metrics["byte_perplexity,none"]))
    assert 1 < metrics["bits_per_byte,none"] < 32


def test_a_missing_extra_is_named(folder, monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.split(".")[0] == "lm_eval")}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mxref\[lm-eval\]'"):
        harness_model(folder)
