"""The Hugging Face config object of a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from meshnet.errors import LoadFailed
from services.node.files.model_config import Config
from services.node.files.support import check_supported

# The first two are no arguments of the config classes, the third names code that is not run. A dtype would be made
# torch's default while a model is built, for all threads of the process, and so for a step that runs meanwhile.
_STORED_ONLY = ("model_type", "transformers_version", "auto_map", "dtype", "torch_dtype")


def make_config(stated: Config) -> Any:
    """A new config object, the caller's to change, from a config in Hugging Face terms.

    Never runs code from a model's repository. Raises LoadFailed if the model cannot be run.
    """
    check_supported(stated)
    options = {key: value for key, value in stated.items() if key not in _STORED_ONLY}
    try:
        return AutoConfig.for_model(stated["model_type"], **options)
    # Whatever validation the config class of the architecture does.
    except Exception as error:
        raise LoadFailed(f"the model's config is not valid: {error}") from error
