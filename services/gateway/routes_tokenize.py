"""`POST /tokenize` and `POST /detokenize`. Neither asks the mesh: they answer while layers are missing."""

from __future__ import annotations

from typing import Any

from quart import Blueprint

from services.gateway.api.chat import template_messages
from services.gateway.api.tokenize import DetokenizeRequest, TokenizeRequest
from services.gateway.bodies import json_body
from services.gateway.formats.logprobs import token_text
from services.gateway.prompts import Target, chat_prompt, check_length, check_token_ids
from services.gateway.service import Service
from services.gateway.tools.conversation import Conversation


def blueprint(service: Service) -> Blueprint:
    routes = Blueprint("tokenize", __name__)

    @routes.post("/tokenize")
    async def tokenize() -> dict[str, Any]:
        request = TokenizeRequest.parse(await json_body())
        target = await service.target(request.model)
        token_ids = await _token_ids(service, request, target)
        token_bytes = target.tokenizer.token_bytes
        strings = [token_text(token_bytes(token_id)) for token_id in token_ids] if request.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": target.model.context_length,
            "tokens": token_ids,
            "token_strs": strings,
        }

    @routes.post("/detokenize")
    async def detokenize() -> dict[str, Any]:
        request = DetokenizeRequest.parse(await json_body())
        target = await service.target(request.model)
        check_token_ids(request.tokens, target.model, "tokens")
        return {"prompt": await service.tokenizers.run(target.tokenizer.decode_whole, request.tokens)}

    return routes


async def _token_ids(service: Service, request: TokenizeRequest, target: Target) -> list[int]:
    if request.messages is not None:
        tools = tuple(tool.template_fields for tool in request.tools)
        conversation = Conversation(template_messages(request.messages), tools)
        special_tokens = bool(request.add_special_tokens)
        prompt = await chat_prompt(
            conversation, 0, "messages", target, service.tokenizers, special_tokens=special_tokens
        )
        return list(prompt.token_ids)
    text = request.prompt or ""
    check_length(text, 0, target, "prompt")
    special_tokens = request.add_special_tokens is not False
    return await service.tokenizers.run(target.tokenizer.encode, text, special_tokens=special_tokens)
