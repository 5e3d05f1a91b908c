"""The adapter to lm-eval, where that is installed."""

import math
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

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


def test_the_readmes_lines_run_as_they_stand(monkeypatch, capsys):
    """With a stand-in for lm-eval, which need not be installed."""
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^    import lm_eval\n(?:(?:    .*)?\n)+?(?=\S)", readme, re.MULTILINE)
    asked = {}

    def simple_evaluate(model, *, tasks, task_manager):
        asked.update(model=model, tasks=tasks, folder=Path(task_manager.include_path))
        return {"results": {"mxref_text": {"bits_per_byte,none": 1.6}}}

    modules = {
        "lm_eval": SimpleNamespace(simple_evaluate=simple_evaluate),
        "lm_eval.tasks": SimpleNamespace(TaskManager=SimpleNamespace),
        "lm_eval.models": SimpleNamespace(),
        "lm_eval.models.huggingface": SimpleNamespace(HFLM=SimpleNamespace),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(textwrap.dedent(lines), {})
    assert "bits_per_byte" in capsys.readouterr().out
    assert asked["model"].pretrained.config.model_type and asked["model"].tokenizer is not None
    assert all(f"task: {name}\n" in (asked["folder"] / f"{name}.yaml").read_text() for name in asked["tasks"])


def test_a_missing_extra_is_named(folder, monkeypatch):
    for name in {"lm_eval", *(name for name in sys.modules if name.split(".")[0] == "lm_eval")}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'mxref\[lm-eval\]'"):
        harness_model(folder)
