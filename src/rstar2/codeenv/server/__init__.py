"""The server: HTTP, the table of calls, and the executor that runs them on jailed workers."""
