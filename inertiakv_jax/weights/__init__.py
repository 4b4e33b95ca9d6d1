"""Weights and tokenizers from hub repositories, folders and single files."""
