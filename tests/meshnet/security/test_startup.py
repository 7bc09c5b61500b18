"""What may be listened at, with a secret and without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from meshnet.errors import InvalidRequest
from meshnet.security.exposure import exposed
from meshnet.security.shared_secret import SharedSecret
from meshnet.security.startup import check_listens
from meshnet.security.token_file import replace_file
from meshnet.security.tokens import make_token

LOOPBACK = ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1", "[::ffff:127.0.0.1]:1"]
WIDE = ["0.0.0.0:1", "[::]:1", ":1", "192.0.2.1:1", "[2001:db8::1]:1", "127.example.net:1", "127.1:1", "host:1"]


def test_which_addresses_others_can_reach() -> None:
    assert exposed({listen: listen for listen in LOOPBACK}) == {}
    assert list(exposed({listen: listen for listen in WIDE})) == WIDE


@pytest.mark.parametrize("listen", WIDE)
def test_beyond_loopback_it_takes_a_token_or_the_plain_truth(
    listen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_listens({"--listen": listen, "--grpc-listen": "127.0.0.1:2"}, None, insecure=False)
    said = str(caught.value)
    assert f"--listen {listen}" in said
    assert "--grpc-listen" not in said
    for way in ("meshnet token FILE", "--token-file FILE", "MESHNET_TOKEN_FILE", "127.0.0.1", "--insecure"):
        assert way in said
    assert not caplog.records

    check_listens({"--listen": listen}, None, insecure=True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "INSECURE" in caplog.text

    caplog.clear()
    replace_file(tmp_path / "token", [make_token()])
    check_listens({"--listen": listen}, SharedSecret(tmp_path / "token"), insecure=False)
    assert not caplog.records


def test_loopback_needs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    check_listens({listen: listen for listen in LOOPBACK}, None, insecure=False)
    check_listens({listen: listen for listen in LOOPBACK}, None, insecure=True)
    assert not caplog.records
