"""The gateway's tokenizers against those of transformers, which needs torch for GGUF files."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from meshnet.errors import InvalidRequest
from meshnet.model_files import ModelFiles
from services.gateway.detokenizer import REPLACEMENT, Detokenizer
from services.gateway.tokenization import ModelTokenizer, load_tokenizer
from services.gateway.tools.conversation import Conversation
from tests.services.node.engine.alice import ALICE

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\ttabs\n\n\nlines \r\n ",
    "naïve café Ünïcödé ﬁ Ⅷ ½",
    "日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 a\u200bb\ufeffc\u0301",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user",
    "<|endoftext|><|im_end|> <|im_end|>x",
    "def f(x):\n    return x**2  # 1234567890 0x1F 3.14e-10",
    "don't we'll I'VE they'd",
    "a" * 300,
    "\x00\x01\x7f\u2028",
]


@pytest.fixture(scope="module")
def ours(smollm2_gguf: Path) -> ModelTokenizer:
    return load_tokenizer(ModelFiles("m", smollm2_gguf))


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.mark.parametrize("text", CORPUS)
def test_a_gguf_file_gives_the_token_ids_that_transformers_gives(ours: ModelTokenizer, theirs: Any, text: str) -> None:
    assert ours.encode(text, special_tokens=True) == theirs(text)["input_ids"]
    bare = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, special_tokens=False) == bare
    assert ours.decode(bare) == theirs.decode(bare, skip_special_tokens=True)


def test_the_tokens_of_the_text_that_the_engine_is_compared_on_are_its_own(theirs: Any) -> None:
    text = (Path(__file__).parents[3] / "benchmarks" / "data" / "alice.txt").read_text(encoding="utf-8")
    assert theirs(text)["input_ids"][: len(ALICE)] == ALICE


def test_any_text_gives_the_same_ids(ours: ModelTokenizer, theirs: Any) -> None:
    @settings(max_examples=200)
    @given(st.text())
    def check(text: str) -> None:
        assert ours.encode(text, special_tokens=True) == theirs(text)["input_ids"]

    check()


def test_the_special_tokens_and_the_template_are_those_of_transformers(ours: ModelTokenizer, theirs: Any) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "hi"}]
    assert ours.render_chat(Conversation(tuple(messages))) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.tokenizer.special_tokens_map == theirs.special_tokens_map
    assert ours.stop_token_ids == ours.chat_stop_token_ids == {2}


def test_any_tokens_stream_as_they_decode_at_once(ours: ModelTokenizer) -> None:
    @settings(max_examples=200)
    @given(st.lists(st.integers(0, 49151), max_size=30) | st.text().map(lambda t: ours.encode(t, special_tokens=False)))
    def check(token_ids: list[int]) -> None:
        detokenizer = Detokenizer(ours.decode)
        got = "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()])
        assert got == ours.decode(token_ids)

    check()


def test_emoji_stream_without_replacement_characters(ours: ModelTokenizer) -> None:
    token_ids = ours.encode("🙂🙃👩‍👩‍👧‍👦漢字", special_tokens=False)
    detokenizer = Detokenizer(ours.decode)
    parts = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(parts) == "🙂🙃👩‍👩‍👧‍👦漢字"
    assert not any(REPLACEMENT in part for part in parts)


def sentencepiece_gguf(path: Path) -> Path:
    """A file as older Llama models have: scores instead of merges, and no word on BOS."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "ab", "▁ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-6.0, -5.0, -4.0, -3.0, -2.0, -1.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 6)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(8)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_sentencepiece_file_gives_the_ids_that_transformers_gives(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "old.gguf")
    ours = load_tokenizer(ModelFiles("old", path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("ab a b", " ab", "é🙂", "</s>ab", "  a"):
        ids = ours.encode(text, special_tokens=True)
        assert ids == theirs(text)["input_ids"]
        assert ids[0] == 1
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        ours.render_chat(Conversation(({"role": "user", "content": "a"},)))


@pytest.fixture(scope="module")
def directory(ours: ModelTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    ours.tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def test_a_directory_gives_the_same_tokenizer(ours: ModelTokenizer, directory: Path) -> None:
    loaded = load_tokenizer(ModelFiles("m", directory))
    for text in CORPUS:
        assert loaded.encode(text, special_tokens=True) == ours.encode(text, special_tokens=True)
    assert loaded.stop_token_ids == {2}


def test_all_end_tokens_of_the_generation_config_stop(directory: Path) -> None:
    config = directory / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_tokenizer(ModelFiles("m", directory)).stop_token_ids == {2, 5, 7}
    config.write_text(json.dumps({"eos_token_id": 5}))
    assert load_tokenizer(ModelFiles("m", directory)).stop_token_ids == {2, 5}
    config.unlink()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content }}", "messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division"),
        ("{% if %}", "Expected"),
    ],
)
def test_what_goes_wrong_in_a_template_is_an_invalid_request(directory: Path, template: str, said: str) -> None:
    loaded = load_tokenizer(ModelFiles("m", directory))
    loaded.tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=said):
        loaded.render_chat(Conversation(({"role": "user", "content": "a"},)))


def test_code_in_a_directory_is_never_run(directory: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    evil = tmp_path / "evil"
    evil.mkdir()
    for file in directory.iterdir():
        (evil / file.name).write_bytes(file.read_bytes())
    config = json.loads((evil / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    (evil / "tokenizer_config.json").write_text(json.dumps(config))
    (evil / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    # Refused or loaded without it: both are fine.
    with contextlib.suppress(ValueError):
        load_tokenizer(ModelFiles("m", evil))
    assert not marker.exists()
