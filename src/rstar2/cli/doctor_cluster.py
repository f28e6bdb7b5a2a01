"""`rstar2 doctor --cluster`: versions, GPUs, ports, shared memory and isolation of every node.

Each node is compared with this machine, where the driver would run. Every version mismatch and
every missing requirement is reported with the node's name.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rstar2.cli.doctor import examine
from rstar2.types import encode

DEADLINE_S = 120.0
LEAST_SHM_GB = 0.5
MOST_SKEW_S = 5.0
EQUAL = ("rstar2", "torch", "transformers", "ray", "vllm")
"""Packages whose versions must agree on all nodes (vLLM: where it is installed)."""


def examine_node(address: str, marker: str | None) -> dict[str, Any]:
    """Collect the facts about the node that this runs on."""
    findings = examine()
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    memory = Path("/dev/shm")
    return {
        "machine": findings["machine"],
        "isolation": findings["isolation"],
        "python": findings["python"],
        "executable": sys.executable,
        "gpus": gpu_names(),
        "port": port,
        "shm_free_gb": round(shutil.disk_usage(memory).free / 2**30, 2) if memory.is_dir() else 0.0,
        "shared": None if marker is None else Path(marker).is_file(),
        "clock": time.time(),
    }


def gpu_names() -> list[str]:
    """The GPUs that nvidia-smi or rocm-smi lists on this machine."""
    for name, arguments in (("nvidia-smi", ["-L"]), ("rocm-smi", ["--showproductname"])):
        if command := shutil.which(name):
            try:
                result = subprocess.run(
                    [command, *arguments], capture_output=True, text=True, timeout=20, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return [f"{name} failed: {error}"]
            return [line.strip() for line in result.stdout.splitlines() if "GPU" in line]
    return []


def examine_cluster(address: str, run: Path | None, *, as_json: bool) -> None:
    """Examine all nodes, print the findings, and exit with 1 if a run would fail."""
    from rstar2.cluster import nodes

    marker = None if run is None else _mark(run)
    nodes.connect(address, cpus=1)
    try:
        own = examine_node("", str(marker) if marker else None)
        answers = nodes.on_every_node(
            examine_node, "", str(marker) if marker else None, deadline_s=DEADLINE_S
        )
    finally:
        nodes.disconnect()
        if marker is not None:
            marker.unlink(missing_ok=True)
    faults = {name: faults_of(answer, own) for name, answer in answers.items()}
    if as_json:
        typer.echo(encode({"nodes": answers, "faults": faults}).decode())
    else:
        _show(answers, faults)
    raise typer.Exit(1 if any(faults.values()) or not answers else 0)


def faults_of(answer: dict[str, Any] | str, own: dict[str, Any]) -> list[str]:
    """Reasons why a run would fail on a node; empty if there are none."""
    if isinstance(answer, str):
        return [f"the node could not be examined: {answer}"]
    faults = []
    if (
        answer["python"]["version"].rpartition(".")[0]
        != own["python"]["version"].rpartition(".")[0]
    ):
        faults.append(f"Python {answer['python']['version']}, here {own['python']['version']}")
    for package in EQUAL:
        there, here = answer["python"]["packages"][package], own["python"]["packages"][package]
        if there != here:
            faults.append(f"{package} {there or 'missing'}, here {here or 'missing'}")
    if not answer["isolation"]["level"]:
        faults.append(f"no isolation for tool calls: {answer['isolation']['reason']}")
    if answer["shm_free_gb"] < LEAST_SHM_GB:
        faults.append(f"{answer['shm_free_gb']} GB of shared memory free, {LEAST_SHM_GB} needed")
    if answer["shared"] is False:
        faults.append("the run directory is not visible: use a file system that all nodes share")
    if abs(answer["clock"] - own["clock"]) > MOST_SKEW_S + DEADLINE_S:
        faults.append("the clock differs by minutes")
    return faults


def _mark(run: Path) -> Path:
    """Create a file in the run directory that every node should see."""
    run.mkdir(parents=True, exist_ok=True)
    marker = run.absolute() / f".seen-{uuid.uuid4().hex[:8]}"
    marker.write_text(f"{os.getpid()}\n")
    return marker


def _show(answers: dict[str, Any], faults: dict[str, list[str]]) -> None:
    table = Table("node", "cores", "GB", "GPUs", "isolation", "shm GB", "rstar2", "torch", box=None)
    for name, answer in answers.items():
        if isinstance(answer, str):
            table.add_row(escape(name), "", "", "", "", "", "", "")
            continue
        machine, packages = answer["machine"], answer["python"]["packages"]
        table.add_row(
            escape(name),
            str(machine["cores"]),
            str(machine["memory_gb"]),
            str(len(answer["gpus"])),
            str(answer["isolation"]["level"] or "none"),
            str(answer["shm_free_gb"]),
            str(packages["rstar2"]),
            str(packages["torch"]),
        )
    console = Console(highlight=False)
    console.print(table)
    for name, node_faults in faults.items():
        for fault in node_faults:
            console.print(f"[red]✗[/] {escape(name)}: {escape(fault)}")
    if not any(faults.values()):
        console.print(f"[green]✓[/] {len(answers)} node(s) can run together")
