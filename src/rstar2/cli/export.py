"""`rstar2 export`: one stage of a run as a model directory of its own, or as a repository of a hub.

The directory prompts as the model was trained (docs/exports.md). Exports of earlier versions of
rstar2 are completed: the trained prompt, the stop tokens and a model card are added.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rstar2.cli.model_directory import model_directory
from rstar2.cli.waiting import waiting
from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import Recipe, load_recipe
from rstar2.environments.base import EnvironmentProtocol
from rstar2.environments.load import load_environment, recipe_problems
from rstar2.errors import InfrastructureError, UserError
from rstar2.files import replacing_directory

if TYPE_CHECKING:
    from rstar2.agent.exported import TrainedPrompt

RunArgument = Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")]
StageOption = Annotated[
    str | None, typer.Option("--stage", help="The stage to export. The default is the last one.")
]
ToOption = Annotated[
    Path | None, typer.Option("--to", help="The directory to write.", metavar="DIR")
]
PushOption = Annotated[
    str | None,
    typer.Option(
        "--push",
        help="Upload to this repository of the Hugging Face hub. It is created if it does not "
        "exist.",
        metavar="OWNER/NAME",
    ),
]
PrivateOption = Annotated[
    bool, typer.Option("--private", help="Make the new repository private (with --push).")
]


AdapterOption = Annotated[
    bool,
    typer.Option(
        "--adapter",
        help="Write the LoRA adapter alone instead of the merged weights. Its base is the model "
        "that the run started from.",
    ),
]


def export(
    run: RunArgument,
    stage: StageOption = None,
    to: ToOption = None,
    push: PushOption = None,
    private: PrivateOption = False,
    adapter: AdapterOption = False,
) -> None:
    """Write a trained model with its prompt, stop tokens and model card, or upload it."""
    if to is None and push is None:
        raise UserError("export needs --to DIR, --push OWNER/NAME, or both")
    if push is not None and push.count("/") != 1:
        raise UserError(f"--push {push!r}: expected OWNER/NAME")
    if to is not None and to.exists():
        raise UserError(f"--to {to} already exists: give a new directory, or remove this one")
    source = stage_directory(run, stage)
    recipe = load_recipe(run / "recipe.yaml", ()).recipe
    with tempfile.TemporaryDirectory(prefix="rstar2-export-") as scratch:
        target = to or Path(scratch) / source.name
        files = adapter_directory(run, source.name) if adapter else None
        with waiting(f"copying {source}"):
            copy_export(run, recipe, source, target.absolute(), files)
        if to is not None:
            typer.echo(f"exported {source} to {to}", err=True)
        if push is not None:
            typer.echo(upload(target, push, private=private))


def copy_export(
    run: Path, recipe: Recipe, source: Path, target: Path, adapter: Path | None = None
) -> None:
    """Copy an export of a run; one of an older version gets its trained prompt and its card.

    With an adapter its files replace the merged weights.
    """
    from rstar2.agent.exported import is_exported
    from rstar2.agent.tokenizer import load_tokenizer
    from rstar2.pipeline.export import complete_export, write_card

    with replacing_directory(target) as temporary:
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, temporary / file.name)
        if not is_exported(str(load_tokenizer(temporary).chat_template)):
            environment = load_environment(recipe.environment, recipe.template)
            prompt = asyncio.run(read_prompt(recipe, environment))
            complete_export(temporary, recipe, environment, prompt)
        write_card(run, source.name, temporary)
        if adapter is not None:
            replace_weights(temporary, adapter)


def adapter_directory(run: Path, stage: str) -> Path:
    """The LoRA adapter of one stage of a run."""
    directory = run / "adapters" / stage
    if not directory.is_dir():
        raise UserError(
            f"--adapter: {run} has no adapter of {stage}: it was not trained with learner.lora"
        )
    return directory


def replace_weights(target: Path, adapter: Path) -> None:
    """Replace the merged weights of a model directory by an adapter."""
    for pattern in ("*.safetensors", "*.safetensors.index.json", "config.json"):
        for file in target.glob(pattern):
            file.unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copyfile(adapter / name, target / name)


async def read_prompt(recipe: Recipe, environment: EnvironmentProtocol) -> TrainedPrompt | None:
    """The trained prompt of a run that is not running."""
    from rstar2.pipeline.export import trained_prompt

    async with AsyncExitStack() as stack:
        stack.push_async_callback(environment.close)
        sandbox: CodeEnvClient | None = None
        if environment.needs_sandbox:
            config = recipe.codeenv.model_copy(update={"warm_up": "never"})
            sandbox = await stack.enter_async_context(await CodeEnvClient.start(config))
        problems = recipe_problems(recipe, environment, "heldout")
        return await trained_prompt(environment, problems, recipe.template, sandbox)


def stage_directory(run: Path, stage: str | None) -> Path:
    """The export of one stage of a run."""
    if stage is None:
        return model_directory(run)
    path = run / "exports" / stage
    if not (path / "config.json").is_file():
        known = sorted(p.parent.name for p in (run / "exports").glob("[!.]*/config.json"))
        raise UserError(
            f"--stage {stage}: {run} has no export of this name: "
            f"{'it has ' + ', '.join(known) if known else 'it has none yet'}"
        )
    return path


def upload(directory: Path, repository: str, *, private: bool) -> str:
    """Upload a model directory; returns the address of the commit."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=f"Upload {directory.name} with rstar2",
        )
    except LocalTokenNotFoundError as error:
        raise UserError(
            "--push: no token of the hub: log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise UserError(
                f"--push {repository}: the hub refused the token: {error}. It needs write access"
            ) from error
        raise InfrastructureError(f"--push {repository}: {error}") from error
    except (ClientError, OSError) as error:
        raise InfrastructureError(
            f"--push {repository}: the hub cannot be reached: {error}"
        ) from error
    return str(commit.commit_url)
