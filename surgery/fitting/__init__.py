"""Fits: tensors in, tensors out. They know nothing of files, walks or checkpoints being written."""
