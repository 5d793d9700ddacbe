"""Fits: tensors in, tensors out. They know nothing of files, of the layer walk or of the writer."""
