"""The client: sends calls to one or several servers, and starts and owns a local one."""

from rstar2.codeenv.client.client import CodeEnvClient
from rstar2.codeenv.client.session import CodeSession

__all__ = ["CodeEnvClient", "CodeSession"]
