"""Shows the secret in every call over a gRPC channel, blocking or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshnet.security.shared_secret import KEY, SharedSecret


class SignedChannel:
    """A channel in all else. The calls are the channel's own: interceptors of grpc.aio would put others in their place,
    which end in other ways when they are cancelled."""

    def __init__(self, channel: Any, secret: SharedSecret) -> None:
        self._channel = channel
        self._secret = secret

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._signed(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._signed(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._signed(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._signed(self._channel.stream_stream(*args, **kwargs))

    def __enter__(self) -> SignedChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    async def __aenter__(self) -> SignedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    def _signed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return method(*args, metadata=(*(metadata or ()), (KEY, self._secret.authorization)), **kwargs)

        return call
