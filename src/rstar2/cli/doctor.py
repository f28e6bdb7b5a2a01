"""`rstar2 doctor`: reports what this machine supports, its isolation level and what to change.

Tries each kernel feature in a temporary child process. Imports neither torch nor any other large
package: versions come from the installed metadata.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rstar2.codeenv.jail import cgroups
from rstar2.codeenv.server import probe
from rstar2.errors import IsolationError
from rstar2.types import encode

PACKAGES = (
    "rstar2", "torch", "transformers", "tokenizers", "safetensors", "math-verify", "numpy",
    "scipy", "sympy", "mpmath", "vllm", "ray",
)  # fmt: skip


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", help="Check every node of this Ray cluster (host:port, or auto)."
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="With --cluster: a directory that all nodes must share."),
    ] = None,
) -> None:
    """Show what this machine supports, its isolation level and the reason, and what to change.

    The exit code is 1 if no isolation level is available. With --cluster, it is 1 if a run would
    fail on one of the nodes.
    """
    if cluster is not None:
        from rstar2.cli.doctor_cluster import examine_cluster

        examine_cluster(cluster, run, as_json=as_json)
        return
    findings = examine()
    if as_json:
        typer.echo(encode(findings).decode())
    else:
        _show(findings)
    raise typer.Exit(0 if findings["isolation"]["level"] else 1)


def examine() -> dict[str, Any]:
    """All findings, in the form of the JSON output."""
    features = probe.probe()
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": _memory_gb("MemTotal"),
            "memory_available_gb": _memory_gb("MemAvailable"),
            "architecture": features.machine,
        },
        "kernel": {
            "release": features.kernel,
            "root": features.root,
            "namespaces": features.namespaces or "yes",
            "seccomp": features.seccomp or "yes",
            "landlock_abi": features.landlock_abi,
            "pidfd": features.pidfd or "yes",
            "cgroups": list(features.cgroups),
            "cgroup_versions": sorted({h.version for h in cgroups.hierarchies()}),
            "huge_pages": features.huge_pages,
        },
        "isolation": _isolation(features),
        "python": {"version": platform.python_version(), "packages": _packages()},
    }


def _isolation(features: probe.Probe) -> dict[str, Any]:
    try:
        resolution = probe.resolve("auto", features)
    except IsolationError as error:
        return {"level": None, "reason": str(error), "advice": [], "child_processes": False}
    return {
        "level": resolution.level,
        "reason": resolution.reason,
        "advice": list(resolution.advice),
        "child_processes": resolution.level == "strict"
        and {"memory", "pids"} <= set(features.cgroups),
    }


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _memory_gb(field: str) -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return round(int(rest.split()[0]) / 2**20, 1)
    return 0.0


def _show(findings: dict[str, Any]) -> None:
    console = Console(highlight=False)
    machine, isolation = findings["machine"], findings["isolation"]
    facts = findings["kernel"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "machine",
        f"{machine['cores']} cores, {machine['memory_gb']} GB "
        f"({machine['memory_available_gb']} GB free), {machine['architecture']}",
    )
    table.add_row("kernel", f"{facts['release']}, {'root' if facts['root'] else 'not root'}")
    table.add_row("  namespaces", _mark(facts["namespaces"] == "yes", facts["namespaces"]))
    table.add_row("  seccomp", _mark(facts["seccomp"] == "yes", facts["seccomp"]))
    landlock = f"ABI {facts['landlock_abi']}" if facts["landlock_abi"] else "missing"
    table.add_row("  Landlock", _mark(facts["landlock_abi"] > 0, landlock))
    table.add_row("  pidfd", _mark(facts["pidfd"] == "yes", facts["pidfd"]))
    versions = "".join(f" (v{v})" for v in facts["cgroup_versions"])
    controllers = ", ".join(facts["cgroups"]) + versions or "none with writable limits"
    table.add_row("  cgroups", _mark({"memory", "pids"} <= set(facts["cgroups"]), controllers))
    huge = facts["huge_pages"]
    table.add_row("  huge pages", _mark(huge in ("always", "madvise"), huge))
    level = isolation["level"]
    table.add_row(
        "isolation",
        f"[{'green' if level else 'red'}]{level or 'none'}[/]: {escape(isolation['reason'])}",
    )
    if level:
        children = "child processes" if isolation["child_processes"] else "no child processes"
        table.add_row("  calls", children)
    for advice in isolation["advice"]:
        table.add_row("  to change", escape(advice))
    packages = findings["python"]["packages"]
    installed = ", ".join(f"{name} {v}" for name, v in packages.items() if v)
    missing = ", ".join(name for name, v in packages.items() if not v)
    table.add_row("python", f"{findings['python']['version']}: {installed}")
    if missing:
        table.add_row("", f"not installed: {missing}")
    console.print(table)


def _mark(good: bool, text: str) -> str:
    return f"[green]✓[/] {escape(text)}" if good else f"[yellow]✗[/] {escape(text)}"
