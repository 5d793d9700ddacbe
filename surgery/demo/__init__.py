"""The embedded demo model and its held-out text, which is also the default data of every command
that needs text.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
TEXT = Path(__file__).parent / "text"
