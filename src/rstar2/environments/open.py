"""An environment together with the code environment that it needs, for one block of code."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.config import CodeEnvConfig
from rstar2.environments.base import EnvironmentProtocol


@asynccontextmanager
async def open_environment(
    environment: EnvironmentProtocol, config: CodeEnvConfig
) -> AsyncIterator[CodeEnvClient | None]:
    """The code environment, if the environment needs it; closes the environment before it."""
    async with AsyncExitStack() as stack:
        tools: CodeEnvClient | None = None
        if environment.needs_sandbox:
            tools = await CodeEnvClient.start(config)
            stack.push_async_callback(tools.close)
        stack.push_async_callback(environment.close)
        yield tools
