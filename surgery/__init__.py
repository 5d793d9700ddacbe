"""Operate on the MLP blocks of trained Hugging Face checkpoints."""

__version__ = "0.1.0"
