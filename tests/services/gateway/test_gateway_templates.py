"""Chat templates and tools: how a model writes calls, and conversations as templates take them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from meshnet.errors import InvalidRequest
from services.gateway.api.chat import template_messages
from services.gateway.tokenization import ModelTokenizer, rendered
from services.gateway.tools.conventions import Convention, Writing
from services.gateway.tools.conversation import Conversation
from services.gateway.tools.trial import convention_of
from tests.services.gateway.test_gateway_tools import CALLED, ONE, TOOLS, TWO, parse

# Small templates that have what published ones have: see docs/api.md.
TOLD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
NEXT = "{% if add_generation_prompt %}[assistant]{% endif %}"
JSON_CALL = """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}"""
CALLS_LOOP = "{% for c in m.tool_calls or [] %}"
HERMES_TEMPLATE = f"{TOLD}{CALLS_LOOP}<tool_call>{JSON_CALL}</tool_call>{{% endfor %}}{{% endfor %}}{NEXT}"
# As DeepSeek's: the arguments are added to a text.
TEXT_TEMPLATE = HERMES_TEMPLATE.replace("c.function.arguments | tojson", "'' + c.function.arguments")
# As Qwen3's: what stands in the content is looked for.
SEARCHING_TEMPLATE = HERMES_TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
# As QwQ's: an answer that is over does not begin as one that is asked for.
THINKING_TEMPLATE = HERMES_TEMPLATE.replace("[assistant]", "[assistant]<think>")
SHORT_IDS = "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
MISTRAL_TEMPLATE = (
    f"{TOLD}{SHORT_IDS}{{{{ m.tool_call_id }}}}{{% if m.tool_calls %}}[TOOL_CALLS] ["
    f"""{CALLS_LOOP}{JSON_CALL[:-1]}, "id": "{{{{ c.id }}}}"}}{{{{ "" if loop.last else ", " }}}}{{% endfor %}}]</s>"""
    f"{{% endif %}}{{% endfor %}}{NEXT}"
)
ARGS_TEMPLATE = (
    f"{TOLD}{CALLS_LOOP}[TOOL_CALLS]{{{{ c.function.name }}}}[CALL_ID]{{{{ c.id }}}}[ARGS]"
    f"{{{{ c.function.arguments | tojson }}}}{{% endfor %}}{{% endfor %}}{NEXT}"
)
ONE_AT_ONCE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at once!') }}{% endif %}"
LLAMA_TEMPLATE = (
    f"{TOLD}{ONE_AT_ONCE}{CALLS_LOOP}{JSON_CALL.replace('arguments', 'parameters', 1)}<|eot_id|>"
    f"{{% endfor %}}{{% endfor %}}{NEXT}"
)
# As GLM's and Qwen3-Coder's: marks that are known around what is not.
OTHER_WAYS = (
    HERMES_TEMPLATE.replace(JSON_CALL, "{{ c.function.name }}<arg_key>{{ c.function.arguments }}</arg_key>"),
    HERMES_TEMPLATE.replace(JSON_CALL, "<function={{ c.function.name }}>{{ c.function.arguments }}</function>"),
    HERMES_TEMPLATE.replace("tool_call>", "tool_calls>"),
    # No calls, no results, no tools.
    f"{TOLD}{{% endfor %}}{NEXT}",
    HERMES_TEMPLATE.replace("{{ m.content }}", "{{ '' if m.role == 'tool' else m.content }}"),
    HERMES_TEMPLATE.replace("{{ tools | tojson }}", ""),
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
NO_SYSTEM_TEMPLATE = f"{NO_SYSTEM}{{% for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"


def of_template(tokenizer: ModelTokenizer, template: str) -> ModelTokenizer:
    """The tokenizer of another model."""

    class Templated:
        chat_template = template

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return tokenizer.tokenizer.apply_chat_template(messages, chat_template=template, **options)

    other = replace(tokenizer, tokenizer=Templated())
    return replace(other, convention=convention_of(partial(rendered, other.tokenizer)))


@pytest.mark.parametrize(
    ("template", "convention"),
    [
        (HERMES_TEMPLATE, Convention(Writing.HERMES, is_native=True)),
        (SEARCHING_TEMPLATE, Convention(Writing.HERMES, is_native=True)),
        (THINKING_TEMPLATE, Convention(Writing.HERMES, is_native=True)),
        (TEXT_TEMPLATE, Convention(Writing.HERMES, is_native=True, has_text_arguments=True)),
        (MISTRAL_TEMPLATE, Convention(Writing.MISTRAL, is_native=True)),
        (ARGS_TEMPLATE, Convention(Writing.MISTRAL_ARGS, is_native=True)),
        (LLAMA_TEMPLATE, Convention(Writing.LLAMA, is_native=True)),
        (NO_SYSTEM_TEMPLATE, Convention(Writing.HERMES, is_native=False, takes_no_system=True)),
        *((template, Convention(Writing.HERMES, is_native=False)) for template in OTHER_WAYS),
        ("{{ nothing.at.all }}", Convention(Writing.HERMES, is_native=False)),
        (None, Convention(Writing.HERMES, is_native=False)),
    ],
)
def test_conventions_are_what_templates_make_of_a_call(
    tokenizer: ModelTokenizer, template: Any, convention: Convention
) -> None:
    if template is None:
        bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend)
        assert convention_of(partial(rendered, bare)) == convention
    else:
        assert of_template(tokenizer, template).convention == convention


def text_of(tokenizer: ModelTokenizer, template: str, messages: Any = CALLED) -> str:
    asked = parse(messages=messages, tools=TOOLS)
    tools = asked.tools_asked()
    assert tools is not None
    conversation = Conversation(template_messages(asked.messages), tools.tools)
    return of_template(tokenizer, template).render_chat(conversation)


def test_templates_that_know_tools_are_given_them(tokenizer: ModelTokenizer) -> None:
    weather, now = '{"name": "weather", "arguments": {"city": "Köln"}}', '{"name": "now", "arguments": {}}'
    for template in (HERMES_TEMPLATE, TEXT_TEMPLATE, SEARCHING_TEMPLATE):
        text = text_of(tokenizer, template)
        assert text.startswith('[{"type": "function", "function": {"name": "weather"')
        said = f"[assistant]<tool_call>{weather}</tool_call><tool_call>{now}</tool_call>[tool]rain[tool]noon"
        assert said in text
    text = text_of(tokenizer, MISTRAL_TEMPLATE)
    first_id = text.split('"id": "')[1][:9]
    assert f"[tool]rain{first_id}[tool]noon" in text


def test_where_one_call_may_be_made_at_once_each_has_its_own_message(tokenizer: ModelTokenizer) -> None:
    weather, now = '{"name": "weather", "parameters": {"city": "Köln"}}', '{"name": "now", "parameters": {}}'
    said = f"[assistant]{weather}<|eot_id|>[tool]rain[assistant]{now}<|eot_id|>[tool]noon[assistant]"
    assert text_of(tokenizer, LLAMA_TEMPLATE).endswith(f"[user]hi{said}")
    # Whatever comes first, and what comes never.
    hi, called, first, second = CALLED
    swapped = text_of(tokenizer, LLAMA_TEMPLATE, [hi, {**called, "content": "I look."}, second, first])
    assert f"[assistant]I look.{weather}<|eot_id|>[assistant]{now}<|eot_id|>[tool]noon[tool]rain" in swapped
    unanswered = text_of(tokenizer, LLAMA_TEMPLATE, [hi, called, first, hi])
    assert f"[tool]rain[assistant]{now}<|eot_id|>[user]hi" in unanswered


def test_where_no_system_may_speak_the_user_tells_of_tools(tokenizer: ModelTokenizer) -> None:
    text = text_of(tokenizer, NO_SYSTEM_TEMPLATE)
    assert text.startswith("[user]# Tools\n")
    assert f"</tool_call>\n\nhi[assistant]{ONE}\n{TWO}[user]<tool_response>" in text
    with pytest.raises(InvalidRequest, match="no system"):
        text_of(tokenizer, NO_SYSTEM_TEMPLATE, [{"role": "system", "content": "Be brief."}, *CALLED])


def test_others_are_told_in_words(tokenizer: ModelTokenizer) -> None:
    tools = parse(tools=TOOLS).tools_asked()
    assert tools is not None
    before = {"role": "system", "content": "Be brief."}
    conversation = Conversation((before, *template_messages(parse(messages=CALLED).messages)), tools.tools)
    text = tokenizer.render_chat(conversation)
    assert "<|im_start|>system\nBe brief.\n\n# Tools\n" in text
    assert '<tools>\n{"type": "function", "function": {"name": "weather", "description": "It tells."' in text
    assert f"<|im_start|>assistant\n{ONE}\n{TWO}<|im_end|>" in text
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text
