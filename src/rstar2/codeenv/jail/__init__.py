"""What runs as, or inside, the confined process. Imports nothing of client and server."""
