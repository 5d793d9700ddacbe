"""Custom-code blocks: what is saved with a checkpoint that no class of transformers computes. One
file each.
"""
