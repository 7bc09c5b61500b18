from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.tokenization import ModelTokenizer
from services.gateway.tools.conversation import Conversation
from tests.services.gateway.fake_mesh import CONTEXT_LENGTH, FakeMesh
from tests.services.gateway.gateway_process import Gateway

HI = [{"role": "user", "content": "hi"}]


def post(gateway: Gateway, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{gateway.url}{path}", json={"model": "smol", **body}, timeout=30)


def test_a_text_is_its_tokens(gateway: Gateway, mesh: FakeMesh, tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("ab é", special_tokens=True)
    answer = post(gateway, "/tokenize", prompt="ab é").json()
    assert answer == {"count": len(ids), "max_model_len": CONTEXT_LENGTH, "tokens": ids, "token_strs": None}
    shown = post(gateway, "/tokenize", prompt="ab é", add_special_tokens=False, return_token_strs=True).json()
    assert shown["token_strs"] == ["ab", " é"]
    assert post(gateway, "/tokenize", prompt="").json()["tokens"] == []
    assert mesh.a.requests == []


def test_a_conversation_is_the_tokens_of_its_template(gateway: Gateway, tokenizer: ModelTokenizer) -> None:
    answer = post(gateway, "/tokenize", messages=HI).json()
    assert answer["tokens"] == tokenizer.encode(tokenizer.render_chat(Conversation(tuple(HI))), special_tokens=False)
    assert answer["count"] == len(answer["tokens"])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(max_codepoint=0x2FFF, categories=["L", "N", "P", "Zs"])))
def test_tokens_go_back_to_their_text(gateway: Gateway, text: str) -> None:
    tokens = post(gateway, "/tokenize", prompt=text).json()["tokens"]
    assert post(gateway, "/detokenize", tokens=tokens).json() == {"prompt": text}


def test_special_tokens_are_shown_by_their_names(gateway: Gateway) -> None:
    tokens = post(gateway, "/tokenize", messages=HI).json()["tokens"]
    assert "<|im_start|>user\nhi<|im_end|>" in post(gateway, "/detokenize", tokens=tokens).json()["prompt"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, 400, "messages"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "word " * 1_000_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, None),
        ("/tokenize", {"messages": HI, "tools": [1]}, 400, "tools[0]"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, None),
    ],
)
def test_bad_requests_name_the_field(
    gateway: Gateway, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = post(gateway, path, **body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
