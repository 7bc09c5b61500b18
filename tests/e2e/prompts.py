"""The ten prompts of the parity tests: short, long, unicode and chat."""

from __future__ import annotations

from typing import Any

_STORY = (
    "The lighthouse keeper wrote down the weather three times a day, in pencil, because ink froze in January. "
    "He noted the wind, the swell, the colour of the sky at dusk and the ships that passed. "
)

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5,",
    "Grüße aus Köln! Das Wetter ist heute",
    "日本の首都は東京です。フランスの首都は",
    "Smile 😀 and the world 🌍 smiles",
    _STORY * 4 + "In spring",
    _STORY * 26 + "At the end of the year he",
]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Name three colours."},
        {"role": "assistant", "content": "Red, green and blue."},
        {"role": "user", "content": "Name three more."},
    ],
]


def prompt_ids(tokenizer: Any) -> list[list[int]]:
    """Token ids of all ten."""
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    return [
        *(tokenizer.encode(text) for text in TEXTS),
        *(tokenizer.encode(text, add_special_tokens=False) for text in rendered),
    ]
