"""Code that runs as, or inside, the confined process. It imports nothing of client and server."""
