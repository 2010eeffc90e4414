"""Sources, tokenizer, virtual streams and the loader.

Nothing is imported here: the background process that loads and tokenises must not import torch.
Start from `titan_nemotron.data.loader.build_loader` and `titan_nemotron.data.tokenizer.build_tokenizer`.
"""
