"""The tokenizers of the models at hand, loaded and used in threads: none of their work runs on the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from meshnet.model_files import HubModel, ModelFiles
from services.gateway.api_errors import ApiError
from services.gateway.tokenization import ModelTokenizer, load_tokenizer

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class TokenizerStore:
    """Loading begins at once, in the background; whoever asks for a tokenizer waits for it."""

    def __init__(self, models: Mapping[str, ModelFiles | HubModel]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
        self._loading = {
            model_id: asyncio.ensure_future(self._load(files)) for model_id, files in sorted(models.items())
        }

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._loading

    async def get(self, model_id: str) -> ModelTokenizer:
        """Raises ApiError (503) for a model without files here, or with files that could not be read."""
        loading = self._loading.get(model_id)
        if loading is None:
            raise ApiError(
                503,
                f"This gateway has no tokenizer files for the model {model_id!r}. Start it with "
                f"--model {model_id}=PATH, a Hugging Face directory, a GGUF file or hf:ORG/NAME, or with --models DIR.",
                code="tokenizer_unavailable",
            )
        # Shielded, because a client that goes away must not end the loading for all others.
        tokenizer = await asyncio.shield(loading)
        if tokenizer is None:
            raise ApiError(
                503,
                f"The tokenizer of the model {model_id!r} could not be loaded; this gateway's log says why.",
                code="tokenizer_unavailable",
            )
        return tokenizer

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function of a tokenizer in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def _load(self, files: ModelFiles | HubModel) -> ModelTokenizer | None:
        try:
            tokenizer = await self.run(load_tokenizer, files)
        except Exception:
            log.exception("the tokenizer of %s could not be loaded", files)
            return None
        log.info("loaded the tokenizer of model %s", files.model_id)
        return tokenizer

    def close(self) -> None:
        for loading in self._loading.values():
            loading.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
