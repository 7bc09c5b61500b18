"""Weights from the Hugging Face hub: the tensors that are needed, by range, at one commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, and not in its __all__

from meshnet.errors import BadFiles
from meshnet.model_files import CONFIG_FILE, HubModel
from services.node.fetching.ranges import make_client, stream_range
from services.node.fetching.source import SourceFailed
from services.node.files.description import Description
from services.node.files.safetensors_header import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorHeader,
    header_length,
    indexed_tensors,
    parse_header,
    parse_object,
)
from services.node.files.support import check_supported
from services.node.files.weight_samples import blocks, digest_of

log = logging.getLogger(__name__)

API_SECONDS = 20.0
# Samples are many small answers, and the time is in the way there.
CONNECTIONS = 16
SAY_SECONDS = 5.0


class HubSource:
    """services.node.fetching.source.Source. For several threads. `sizes`: bytes of the repository's files."""

    def __init__(self, model: HubModel, commit: str, sizes: Mapping[str, int]) -> None:
        self.name = f"hf:{model.repo}@{commit[:12]}"
        self.commit = commit
        self._repo = model.repo
        self.sizes = sizes
        self._headers = build_hf_headers()
        # The hub sends to where its files are, and may lie behind a proxy.
        self._client = make_client(follow_redirects=True, connections=CONNECTIONS)

    @classmethod
    def resolve(cls, model: HubModel) -> Self:
        """Asks the hub which commit and files the model means now. Raises SourceFailed."""
        try:
            info = HfApi().model_info(model.repo, revision=model.revision, timeout=API_SECONDS, files_metadata=True)
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            raise SourceFailed(f"{model}: {_first_line(error)}") from error
        except Exception as error:
            # The library passes the errors of its HTTP client on, which have no base in common with others.
            raise SourceFailed(f"{model}: the hub cannot be reached: {_first_line(error)}") from error
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if not info.sha or CONFIG_FILE not in files:
            raise SourceFailed(f"{model} has no {CONFIG_FILE}: only repositories of transformers models can be served")
        return cls(model, info.sha, files)

    def close(self) -> None:
        self._client.close()

    def describe(self) -> Description:
        """Reads headers and samples, not the weights. Raises LoadFailed if the model cannot be served."""
        config = self._json(CONFIG_FILE)
        check_supported(config)
        tensors = self._tensors()
        sizes = {file: self._size(file) for file in sorted({tensor.file for tensor in tensors.values()})}
        return Description(config, sizes, tensors, self._digests(tensors))

    def stream(self, file: str, begin: int, end: int) -> Iterator[bytes]:
        return stream_range(self._client, self._url(file), begin, end, self._headers)

    def digests(self, names: Collection[str]) -> None:
        """The hub knows those of whole files only."""

    def _tensors(self) -> Mapping[str, TensorHeader]:
        if INDEX_FILE in self.sizes:
            return indexed_tensors(self._json(INDEX_FILE), self._header)
        if SINGLE_FILE in self.sizes:
            return self._header(SINGLE_FILE)
        raise BadFiles(f"{self.name} has neither a {SINGLE_FILE} nor a {INDEX_FILE}")

    def _header(self, file: str) -> dict[str, TensorHeader]:
        size = self._size(file)
        length = header_length(file, self._read(file, 0, 8), size)
        return parse_header(file, self._read(file, 8, 8 + length), size)

    def _digests(self, tensors: Mapping[str, TensorHeader]) -> dict[str, str]:
        """As weight_samples.sample_digests computes them of files."""
        said, done = time.monotonic(), 0
        digests: dict[str, str] = {}
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            for name, digest in zip(tensors, pool.map(self._digest, tensors.values()), strict=True):
                digests[name] = digest
                done += 1
                if time.monotonic() > said + SAY_SECONDS:
                    said = time.monotonic()
                    log.info("%s: sampled %d of %d tensors", self.name, done, len(tensors))
        return digests

    def _digest(self, tensor: TensorHeader) -> str:
        return digest_of(
            self._read(tensor.file, tensor.begin + offset, tensor.begin + offset + length)
            for offset, length in blocks(tensor.num_bytes)
        )

    def _read(self, file: str, begin: int, end: int) -> bytes:
        return b"".join(self.stream(file, begin, end))

    def _json(self, file: str) -> dict[str, Any]:
        """A small file, by way of the library's own cache."""
        try:
            path = hf_hub_download(self._repo, file, revision=self.commit)
            return parse_object(file, Path(path).read_bytes())
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise SourceFailed(f"{self.name}: {file}: {_first_line(error)}") from error

    def _size(self, file: str) -> int:
        if file not in self.sizes:
            raise BadFiles(f"{self.name} lacks {file}, which its index names")
        return self.sizes[file]

    def _url(self, file: str) -> str:
        return hf_hub_url(self._repo, file, revision=self.commit)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
