"""Custom-code blocks: each is a file that is saved with a checkpoint, where no class of
transformers computes the result.
"""
