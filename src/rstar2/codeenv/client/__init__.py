"""The client: sends calls to one or several servers, and starts and owns a local one."""
