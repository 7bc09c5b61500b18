"""A tiny Llama with random weights: loads in a moment, computes like a big one."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

NUM_LAYERS = 6


def save_tiny_llama(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    # Weights large enough that tokens are told apart clearly; the default ones make near-ties everywhere.
    config.initializer_range = 0.2
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
