"""Files that other engines read: GGUF for llama.cpp."""
