"""From a checked request to the stream of its choices. Knows tokenizers and the mesh, not HTTP."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet.errors import InvalidGrammar, MeshnetError
from meshnet.topology import Topology
from meshnet.vocabulary import Vocabulary
from services.gateway.api.completions import CompletionRequest
from services.gateway.api.sampling import SamplingRequest
from services.gateway.api_errors import ApiError, from_mesh_error, invalid
from services.gateway.choice import Choice
from services.gateway.choices import prepared_choices
from services.gateway.entry import deployed_model
from services.gateway.formats.answer import Usage
from services.gateway.generation import FinishReason, Form
from services.gateway.grammars import Grammar
from services.gateway.limits import COMPLETION_DEFAULT_TOKENS
from services.gateway.merging import merged
from services.gateway.mesh_client import MeshClient, no_topology
from services.gateway.metrics import ABORT, ERROR, ChoiceMeter, Metrics
from services.gateway.prompts import Target, chat_prompt, completion_prompts
from services.gateway.text_output import Piece
from services.gateway.tokenizers_store import TokenizerStore
from services.gateway.tools.calls import ToolsAsked
from services.gateway.tools.conversation import Conversation
from services.gateway.tools.grammar import calls_grammar


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request ready for the mesh, and what turns its tokens into text."""

    target: Target
    choices: Sequence[Choice]
    # When the request came, by the clock of the metrics.
    arrived: float

    @property
    def request_id(self) -> str:
        return self.choices[0].generation.request_id

    @property
    def usage(self) -> Usage:
        """So far. A prompt counts once, however many choices it has; what the least lucky of them found cached, too."""
        prompts = {choice.prompt_index: len(choice.generation.prompt_token_ids) for choice in self.choices}
        cached = {
            index: min(choice.num_cached_tokens for choice in self.choices if choice.prompt_index == index)
            for index in prompts
        }
        num_tokens = sum(choice.output.num_tokens for choice in self.choices)
        return Usage(sum(prompts.values()), num_tokens, sum(cached.values()))


@dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A piece of the choice of that index."""

    index: int
    piece: Piece


class Service:
    """Prepares requests and runs them."""

    def __init__(
        self,
        mesh: MeshClient,
        tokenizers: TokenizerStore,
        metrics: Metrics | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self.mesh = mesh
        self.tokenizers = tokenizers
        self.metrics = metrics or Metrics()
        self._vocabularies: dict[tuple[str, int], Vocabulary] = {}
        self._new_id = new_id or (lambda: str(uuid.uuid4()))

    @property
    def topology(self) -> Topology:
        """Raises ApiError (503) while there is none."""
        if self.mesh.topology is None:
            raise no_topology(self.mesh.tracker)
        return self.mesh.topology

    async def prepare_completion(self, request: CompletionRequest) -> Prepared:
        """Raises ApiError."""
        arrived = self.metrics.clock()
        target = await self._ready(request.model)
        asked = COMPLETION_DEFAULT_TOKENS if request.tokens_asked is None else request.tokens_asked
        prompts = await completion_prompts(request, asked, target, self.tokenizers)
        stops = target.tokenizer.stop_token_ids
        form = await self._form(request.grammar, target)
        choices = prepared_choices(request, asked, prompts, stops, target, self._new_id, form)
        return Prepared(target, choices, arrived)

    async def prepare_chat(
        self,
        request: SamplingRequest,
        messages: Sequence[Mapping[str, Any]],
        param: str = "messages",
        tools: ToolsAsked | None = None,
    ) -> Prepared:
        """`messages` are as chat templates take them; `param` is the field that they came from. Raises ApiError."""
        arrived = self.metrics.clock()
        target = await self._ready(request.model)
        asked = request.tokens_asked
        conversation = Conversation(tuple(messages), tools.tools if tools else ())
        prompt = await chat_prompt(conversation, asked or 1, param, target, self.tokenizers)
        stops = target.tokenizer.chat_stop_token_ids
        form = await self._form(_grammar(request, tools, target), target)
        choices = prepared_choices(request, asked, [prompt], stops, target, self._new_id, form, tools)
        return Prepared(target, choices, arrived)

    async def _form(self, grammar: Grammar | None, target: Target) -> Form | None:
        if grammar is None:
            return None
        key = target.model.model_id, target.model.manifest.vocab_size
        if key not in self._vocabularies:
            self._vocabularies[key] = await self.tokenizers.run(target.tokenizer.vocabulary, key[1])
        return Form(grammar, self._vocabularies[key])

    async def target(self, model_id: str) -> Target:
        """Raises ApiError for a model that is not deployed or has no tokenizer here."""
        try:
            model = deployed_model(self.topology, model_id)
        except MeshnetError as error:
            raise from_mesh_error(error) from error
        return Target(model, await self.tokenizers.get(model_id))

    async def pieces(
        self, prepared: Prepared, silence: float | None = None
    ) -> AsyncGenerator[ChoicePiece | None, None]:
        """Pieces of the choices, which run at once, as they become certain; None after `silence` seconds of nothing.

        The first piece of a choice comes, perhaps empty, with the first token. If one choice fails, all end.
        Raises ApiError.
        """
        running = [self._measured(choice, prepared.arrived) for choice in prepared.choices]
        try:
            async with contextlib.aclosing(merged(running, silence)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            model_id, usage = prepared.target.model.model_id, prepared.usage
            self.metrics.prompt_tokens.labels(model_id).inc(usage.num_prompt_tokens)
            self.metrics.cached_tokens.labels(model_id).inc(usage.num_cached_tokens)

    async def _measured(self, choice: Choice, arrived: float) -> AsyncGenerator[ChoicePiece, None]:
        meter = ChoiceMeter(self.metrics, choice.generation.model_id, arrived)
        reason = ABORT
        try:
            async with contextlib.aclosing(self._run(choice, meter)) as pieces:
                async for piece in pieces:
                    yield piece
            reason = choice.output.finish_reason or ERROR
        except Exception:
            reason = ERROR
            raise
        finally:
            meter.end(reason)

    async def _run(self, choice: Choice, meter: ChoiceMeter) -> AsyncGenerator[ChoicePiece, None]:
        if not choice.needs_mesh:
            for piece in choice.without_mesh():
                yield ChoicePiece(choice.index, piece)
            return
        try:
            async with contextlib.aclosing(self.mesh.generate(choice.generation)) as events:
                async for event in events:
                    if event.finish_reason is FinishReason.ABORT:
                        raise ApiError(503, "The generation was aborted.", code="aborted")
                    if event.token_id is not None:
                        meter.token()
                    for piece in choice.received(event):
                        yield ChoicePiece(choice.index, piece)
                    if choice.output.finish_reason is not None:
                        return
        except MeshnetError as error:
            raise from_mesh_error(error) from error
        except ApiError as error:
            raise _at_its_field(error, choice.generation.form) from error

    async def _ready(self, model_id: str) -> Target:
        """Fails before any work is done for a model that could not answer."""
        try:
            deployed_model(self.topology, model_id)
            await self.mesh.entry_node(model_id, turn=0)
        except MeshnetError as error:
            raise from_mesh_error(error) from error
        return await self.target(model_id)


def _grammar(request: SamplingRequest, tools: ToolsAsked | None, target: Target) -> Grammar | None:
    """A text that may be content of a form must be that or calls."""
    grammar = request.grammar
    if tools is None or (grammar is None and not tools.must_call):
        return grammar
    tokenizer = target.tokenizer
    content = None if tools.must_call else grammar
    return calls_grammar(tokenizer.convention.writing, tools, tokenizer.marker_ids, content)


def _at_its_field(error: ApiError, form: Form | None) -> ApiError:
    if form is None or error.code != InvalidGrammar.code:
        return error
    param = form.grammar.param
    return invalid(f"Invalid {param!r}: {error.message}.", param, error.code)
