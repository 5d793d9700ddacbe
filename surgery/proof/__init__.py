"""What shows that an output is right: files, names, parity of logits, quality, routing."""
