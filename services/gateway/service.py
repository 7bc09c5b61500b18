"""From a checked request to the stream of its text. Knows tokenizers and the mesh, not HTTP."""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from meshnet.errors import InvalidRequest, MeshnetError
from meshnet.topology import DeployedModel, Topology
from services.gateway.api_errors import ApiError, from_mesh_error, invalid
from services.gateway.entry import deployed_model
from services.gateway.limits import COMPLETION_DEFAULT_TOKENS, max_new_tokens, too_long
from services.gateway.mesh_client import FinishReason, Generation, MeshClient, no_topology
from services.gateway.openai_types import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.text_output import LENGTH, STOP, TextOutput
from services.gateway.tokenization import ModelTokenizer
from services.gateway.tokenizers_store import TokenizerStore

# The mesh takes a probability above 0, or 0 for all tokens; to clients 0 is the smallest set there is, one token.
_SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the mesh, and what turns its tokens into text."""

    generation: Generation
    output: TextOutput

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.generation.prompt_token_ids)


class Service:
    """Prepares requests and runs them."""

    def __init__(self, mesh: MeshClient, tokenizers: TokenizerStore, new_id: Callable[[], str] | None = None) -> None:
        self.mesh = mesh
        self.tokenizers = tokenizers
        self._new_id = new_id or (lambda: str(uuid.uuid4()))

    @property
    def topology(self) -> Topology:
        """Raises ApiError (503) while there is none."""
        if self.mesh.topology is None:
            raise no_topology(self.mesh.tracker)
        return self.mesh.topology

    async def prepare_completion(self, request: CompletionRequest) -> Prepared:
        """Raises ApiError."""
        model, tokenizer = await self._model(request.model)
        prompt = request.prompt
        if isinstance(prompt, str):
            _check_length(prompt, tokenizer, model, request.max_tokens or COMPLETION_DEFAULT_TOKENS, "prompt")
            prompt = await self.tokenizers.run(tokenizer.encode, prompt, special_tokens=True)
        elif any(token_id >= model.manifest.vocab_size for token_id in prompt):
            raise invalid(f"The prompt has a token id that is not below {model.manifest.vocab_size}.", "prompt")
        budget = max_new_tokens(
            len(prompt),
            request.max_tokens,
            COMPLETION_DEFAULT_TOKENS,
            model.context_length,
            model.kv_tokens,
            "prompt",
        )
        return self._prepared(request, tokenizer, prompt, budget, tokenizer.stop_token_ids)

    async def prepare_chat(self, request: ChatRequest) -> Prepared:
        """Raises ApiError."""
        model, tokenizer = await self._model(request.model)
        messages = [message.template_fields for message in request.messages]
        _check_length("".join(m["content"] for m in messages), tokenizer, model, request.tokens_asked or 1, "messages")
        try:
            # The template writes BOS itself where it belongs: a tokenizer that adds its own would double it.
            prompt = await self.tokenizers.run(
                lambda: tokenizer.encode(tokenizer.render_chat(messages), special_tokens=False)
            )
        except InvalidRequest as error:
            raise invalid(f"Invalid 'messages': {error}", "messages", "chat_template_error") from error
        budget = max_new_tokens(
            len(prompt), request.tokens_asked, None, model.context_length, model.kv_tokens, "messages"
        )
        return self._prepared(request, tokenizer, prompt, budget, tokenizer.chat_stop_token_ids)

    async def text(self, prepared: Prepared) -> AsyncGenerator[str, None]:
        """Pieces of the answer, as they become certain; `prepared.output` then says how it ended.

        The first piece comes, perhaps empty, with the first token. Raises ApiError.
        """
        output = prepared.output
        try:
            async with contextlib.aclosing(self.mesh.generate(prepared.generation)) as events:
                async for event in events:
                    if not output.num_tokens:
                        output.num_cached_tokens = event.cached_tokens
                    if event.token_id is not None:
                        yield output.push(event.token_id)
                    if event.finish_reason is FinishReason.ABORT:
                        raise ApiError(503, "The generation was aborted.", code="aborted")
                    if event.finish_reason is not None:
                        yield output.finish(STOP if event.finish_reason is FinishReason.STOP else LENGTH)
                    if output.finish_reason is not None:
                        return
        except MeshnetError as error:
            raise from_mesh_error(error) from error

    async def _model(self, model_id: str) -> tuple[DeployedModel, ModelTokenizer]:
        """Fails before any work is done for a model that could not answer."""
        try:
            model = deployed_model(self.topology, model_id)
            await self.mesh.entry_node(model_id, turn=0)
        except MeshnetError as error:
            raise from_mesh_error(error) from error
        return model, await self.tokenizers.get(model_id)

    def _prepared(
        self,
        request: GenerationRequest,
        tokenizer: ModelTokenizer,
        prompt: list[int],
        budget: int,
        stop_token_ids: frozenset[int],
    ) -> Prepared:
        stop_token_ids = frozenset() if request.ignore_eos else stop_token_ids
        generation = Generation(
            request_id=self._new_id(),
            model_id=request.model,
            prompt_token_ids=tuple(prompt),
            max_new_tokens=budget,
            temperature=request.temperature,
            top_p=max(request.top_p, _SMALLEST_TOP_P),
            top_k=max(request.top_k, 0),
            seed=None if request.seed is None else request.seed % 2**64,
            stop_token_ids=tuple(sorted(stop_token_ids)),
        )
        return Prepared(generation, TextOutput(tokenizer.decode, stop_token_ids, request.stops))


def _check_length(text: str, tokenizer: ModelTokenizer, model: DeployedModel, wanted: int, param: str) -> None:
    """Refuses, untokenized, a text that is too long even if it were all the longest tokens."""
    context_length = model.context_length
    fewest = math.ceil(len(text) / tokenizer.max_token_chars)
    if fewest > context_length:
        raise too_long(context_length, f"at least {fewest}", wanted, param)
