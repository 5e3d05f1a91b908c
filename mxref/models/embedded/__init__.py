"""The small model that `mxref eval` runs without arguments, and the held-out text it is evaluated on."""

from pathlib import Path

MODEL_DIRECTORY = Path(__file__).parent
TEXT_FILE = MODEL_DIRECTORY / "persuasion.txt"
