"""The built-in demo model and its held-out text.

The text is also the default data of every command that needs some.
"""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
TEXT = Path(__file__).parent / "text"
DEMO = "demo"  # what recipes and records call the embedded model
