"""The files of examples/deploy: they parse, what they name exists, and rstar2 takes their commands.
Nothing here builds an image or submits a job."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from rstar2.config import load_recipe
from tests.doc_commands import ROOT, parse

DEPLOY = ROOT / "examples" / "deploy"


def checked(words: list[str]) -> None:
    """Parse a command of rstar2, and load its recipe with its settings."""
    assert words[0] == "rstar2"
    parse(words[1:])
    if words[1] == "train":
        settings = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
        load_recipe(words[2], settings)


def instructions(path: Path) -> list[tuple[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def test_the_image_copies_files_that_docker_sees() -> None:
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copies = [rest for name, rest in instructions(DEPLOY / "Dockerfile") if name == "COPY"]
    sources = {s for rest in copies if "--from" not in rest for s in rest.split()[:-1]}
    assert sources <= kept
    assert [s for s in sources if not (ROOT / s).exists()] == []


def test_the_image_installs_extras_that_exist_and_runs_as_a_user() -> None:
    steps = dict(instructions(DEPLOY / "Dockerfile"))
    runs = " ".join(rest for name, rest in instructions(DEPLOY / "Dockerfile") if name == "RUN")
    (extras,) = re.findall(r"\$wheel\[([\w,]+)\]", runs)
    project = (ROOT / "pyproject.toml").read_text()
    assert [e for e in extras.split(",") if f"\n{e} = [" not in project] == []
    assert steps["USER"] not in ("root", "0")
    assert json.loads(steps["ENTRYPOINT"]) == ["rstar2"]
    checked(["rstar2", *json.loads(steps["CMD"])])
    assert re.fullmatch(r"python:3\.1[123]-slim", steps["FROM"])


def test_the_commands_in_the_comments_of_the_image_are_right() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (command,) = re.findall(r"rstar2-train (train .+)", text)
    checked(["rstar2", *shlex.split(command)])
    assert "-f examples/deploy/Dockerfile" in text


def test_the_services_of_the_compose_file() -> None:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"sandbox", "train"}
    for service in services.values():
        context = (DEPLOY / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
    checked(["rstar2", "codeenv", "serve", *services["sandbox"]["command"]])
    checked(["rstar2", *services["train"]["command"]])
    assert services["sandbox"]["cap_drop"] == ["ALL"]
    assert "deploy" not in services["sandbox"]  # no GPU for untrusted programs
    assert services["sandbox"]["networks"] == ["calls"]
    networks = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["networks"]
    assert networks["calls"]["internal"] is True


def test_the_batch_script_is_shell_and_its_commands_parse() -> None:
    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    text = script.read_text()
    commands = re.findall(r"^(rstar2 .+?)(?: &)?$", text, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        checked(shlex.split(command))
    assert text.startswith("#!")
    assert "#SBATCH --nodes=" in text


def test_the_ray_job_has_the_shape_that_kuberay_reads() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    checked(shlex.split(job["spec"]["entrypoint"]))
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    gpus = int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    recipe = load_recipe("rstar2-agent-14b").recipe
    assert gpus * workers["replicas"] == recipe.engine.count == recipe.learner.ranks
