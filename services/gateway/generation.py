"""What an entry node is asked for, and what it tells: the messages of one generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from meshnet.logprobs import TokenLogprobs
from meshnet.vocabulary import Vocabulary
from services.gateway.grammars import Grammar


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. `seed` None draws a fresh one; `top_k` 0 keeps all tokens; `logit_bias` is by token id."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar in the tokens of a vocabulary."""

    grammar: Grammar
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Generation:
    """`top_logprobs` None asks for no logprobs. The last `num_generated` tokens of the prompt were generated before.
    `form`: what the text must be, None for anything."""

    request_id: str
    model_id: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    num_generated: int = 0
    form: Form | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token, the end, or both. In the first: how many tokens of the prompt were not computed again, and the logprobs
    of all its tokens but the first, if asked for."""

    token_id: int | None
    finish_reason: FinishReason | None
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class Progress:
    """How far a generation has come, whichever entry nodes drove it."""

    generation: Generation
    token_ids: list[int]
    has_begun: bool = False

    def received(self, event: TokenEvent) -> None:
        self.has_begun = True
        if event.token_id is not None:
            self.token_ids.append(event.token_id)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left to ask for but the end."""
        begun = self.has_begun or not self.generation.prompt_logprobs
        return begun and len(self.token_ids) >= self.generation.max_new_tokens

    def rest(self, request_id: str) -> Generation:
        """What is left to ask another entry node for. `min_new_tokens` stays: the mesh counts `num_generated` to it.

        Under a new id, since the lost entry node may still be writing to the old session on the hops behind it.
        """
        whole, num_tokens = self.generation, len(self.token_ids)
        return replace(
            whole,
            request_id=request_id,
            prompt_token_ids=(*whole.prompt_token_ids, *self.token_ids),
            max_new_tokens=whole.max_new_tokens - num_tokens,
            prompt_logprobs=whole.prompt_logprobs and not self.has_begun,
            num_generated=whole.num_generated + num_tokens,
        )
