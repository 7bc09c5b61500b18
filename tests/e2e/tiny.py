"""A tiny Llama with random weights: loads in a moment, computes like a big one."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_LAYERS = 6
VOCAB_SIZE = 512
# With KV cache room for so many tokens a layer takes 16.78 MB and its weights (0.09 MB in bfloat16, 0.05 in int8, 0.02
# in nf4). That is more than a node gains when it has measured its workspace, for which 16.78 MB count until then: it
# has room for as many layers before and after.
KV_TOKENS = 131072


def save_tiny_llama(
    folder: Path,
    seed: int = 0,
    *,
    num_layers: int = NUM_LAYERS,
    context_length: int = 1024,
    vocabulary: bool = False,
    initializer_range: float = 0.2,
    intermediate_size: int = 160,
) -> Path:
    """`vocabulary`: also a tokenizer whose tokens are the words t0 to t511, so that text can be read back as ids.
    `initializer_range` 0.05: likeliest is the last token once more.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        tie_word_embeddings=True,
    )
    # Weights large enough that tokens are told apart clearly; the default ones make near-ties everywhere.
    config.initializer_range = initializer_range
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    if vocabulary:
        tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB_SIZE)}))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def room_for(num_layers: int) -> str:
    """What a node must lend, as the command line takes it. In float32 a layer counts twice."""
    return f"{16.8 + 16.9 * num_layers + 0.1:.1f}MB"


def token_ids(text: str) -> list[int]:
    """What such a tokenizer has decoded."""
    return [int(word.removeprefix("t")) for word in text.split()]
