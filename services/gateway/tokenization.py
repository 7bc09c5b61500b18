"""Tokenizers and chat templates, from a Hugging Face directory or a GGUF file. Runs without torch.

Everything here may take long, so it is called in worker threads only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from huggingface_hub import snapshot_download
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_TOKENIZER_MAPPING,
    convert_gguf_tokenizer,
)

from meshnet.errors import InvalidRequest
from meshnet.model_files import HubModel, ModelFiles
from meshnet.vocabulary import Vocabulary, vocabulary_of
from services.gateway.detokenizer import Detokenizer
from services.gateway.token_bytes import TokenBytes
from services.gateway.tools.conventions import MARKERS, Convention
from services.gateway.tools.conversation import Conversation, adapted
from services.gateway.tools.trial import convention_of

# Names of tokens that end a turn in chat templates, in models whose configuration names another end token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>")
_TOKENIZER_FILES = ["config.json", "generation_config.json", "*token*", "vocab.*", "merges.txt", "*.jinja", "*.model"]
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)
_GGUF_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """The tokenizer of one model. Methods may run in several threads at once."""

    tokenizer: Any
    backend: Tokenizer
    stop_token_ids: frozenset[int]
    chat_stop_token_ids: frozenset[int]
    max_token_chars: int
    token_bytes: TokenBytes
    special_token_ids: frozenset[int]
    convention: Convention
    # Of the marks of calls that are special tokens.
    marker_ids: Mapping[str, int]

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text; with the special tokens that begin a text, if asked."""
        # In batches, because only those release the interpreter lock; "fast" leaves out offsets, which nobody reads.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        """As `encode` with special tokens, and where in the text each token begins, in characters."""
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=True)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=True)
        return text

    def decode_with_markers(self, token_ids: Sequence[int]) -> str:
        """As `decode`, with the special tokens that mark calls."""
        kept = frozenset(self.marker_ids.values())
        wanted = [id_ for id_ in token_ids if id_ in kept or id_ not in self.special_token_ids]
        text: str = self.backend.decode(wanted, skip_special_tokens=False)
        return text

    def decode_whole(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens by their names."""
        text: str = self.backend.decode(token_ids, skip_special_tokens=False)
        return text

    def decode_with_offsets(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """As `decode`, and where in the text each token begins, in characters."""
        detokenizer = Detokenizer(self.decode)
        text, offsets = "", []
        for token_id in token_ids:
            offsets.append(len(text))
            text += detokenizer.push(token_id)
        return text + detokenizer.flush(), offsets

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """The texts of the tokens of a model with so many logits. Takes a moment."""
        # What ends a text is no part of it.
        special = self.special_token_ids | self.chat_stop_token_ids | self.stop_token_ids
        return vocabulary_of(
            [self.token_bytes(token_id) for token_id in range(vocab_size)],
            [token_id for token_id in special if token_id < vocab_size],
        )

    def render_chat(self, conversation: Conversation) -> str:
        """The prompt text of a conversation. Raises InvalidRequest with what the template has against it."""
        if not self.tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions")
        conversation = adapted(conversation, self.convention)
        try:
            return rendered(self.tokenizer, conversation)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error


def rendered(tokenizer: Any, conversation: Conversation) -> str:
    """Up to where the next answer begins. Raises whatever a template raises."""
    text: str = tokenizer.apply_chat_template(
        list(conversation.messages),
        tools=list(conversation.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text


def load_tokenizer(files: ModelFiles | HubModel) -> ModelTokenizer:
    """Raises whatever the libraries raise for files that are damaged, of no known kind, or not to be had."""
    if isinstance(files, HubModel):
        files = _from_hub(files)
    if files.is_gguf:
        tokenizer, generation_config = _from_gguf(files.path), {}
    else:
        # Never code from the model's directory, and never the network.
        tokenizer = AutoTokenizer.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
        generation_config = _read_json(files.path / "generation_config.json")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    vocabulary: dict[str, int] = backend.get_vocab()
    special = _special_ids(backend)
    stops = _eos_ids(generation_config) | ({tokenizer.eos_token_id} - {None})
    turns = {vocabulary[token] for token in _END_OF_TURN if _ends_turns(token, tokenizer, vocabulary)}
    return ModelTokenizer(
        tokenizer=tokenizer,
        backend=backend,
        stop_token_ids=frozenset(stops),
        chat_stop_token_ids=frozenset(stops | turns),
        max_token_chars=max(map(len, vocabulary), default=1),
        token_bytes=TokenBytes(backend),
        special_token_ids=special,
        convention=convention_of(functools.partial(rendered, tokenizer)),
        marker_ids={mark: vocabulary[mark] for mark in MARKERS if vocabulary.get(mark) in special},
    )


def _from_hub(model: HubModel) -> ModelFiles:
    """All but the weights, in the hub library's own cache."""
    folder = snapshot_download(model.repo, revision=model.revision, allow_patterns=_TOKENIZER_FILES)
    return ModelFiles(model.model_id, Path(folder))


def _special_ids(backend: Tokenizer) -> frozenset[int]:
    return frozenset(id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special)


def _ends_turns(token: str, tokenizer: Any, vocabulary: Mapping[str, int]) -> bool:
    return token in vocabulary and token in str(tokenizer.chat_template)


def _eos_ids(generation_config: Mapping[str, Any]) -> set[int]:
    eos = generation_config.get("eos_token_id")
    return {token_id for token_id in (eos if isinstance(eos, list) else [eos]) if isinstance(token_id, int)}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    """What `AutoTokenizer.from_pretrained(..., gguf_file=...)` makes; that one imports torch."""
    metadata = _gguf_metadata(path)
    fields, settings = (
        {name: metadata[key] for short, name in names.items() if (key := f"tokenizer.{short}") in metadata}
        for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    kind = fields.get("tokenizer_type")
    if kind == "llama":
        # Older files have no flag, and a sentencepiece vocabulary that does not say otherwise begins with BOS.
        settings.setdefault("add_bos_token", True)
    elif kind == "gemma4":
        # The flag is set, but the chat template writes BOS itself.
        settings["add_bos_token"] = False
    for name, key in _GGUF_SPECIAL_TOKENS.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}")
        settings[name] = fields["tokens"][token_id] if token_id is not None else None
    backend, more = convert_gguf_tokenizer(metadata["general.architecture"], fields)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def _gguf_metadata(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    wanted = ("tokenizer.", "general.architecture")
    return {name: field.contents() for name, field in reader.fields.items() if name.startswith(wanted)}
