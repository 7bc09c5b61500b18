"""What people write of models."""

from __future__ import annotations

import pytest

from meshnet.errors import InvalidRequest
from meshnet.model import Quantization, parse_quantizations

Q = Quantization


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("bfloat16", (Q.BFLOAT16,)),
        ("nf4,int8", (Q.NF4, Q.INT8)),
        (" BFloat16 , int8,nf4", (Q.BFLOAT16, Q.INT8, Q.NF4)),
        ("bfloat16+int8", (Q.BFLOAT16, Q.INT8)),
    ],
)
def test_quantizations_are_read_best_first(text: str, wanted: tuple[Quantization, ...]) -> None:
    assert parse_quantizations(text) == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a quantization"),
        ("int4", "use bfloat16, int8, nf4, float32"),
        ("int8,int8", "twice"),
        ("int8,", "'' is not a quantization"),
    ],
)
def test_other_words_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        parse_quantizations(text)
