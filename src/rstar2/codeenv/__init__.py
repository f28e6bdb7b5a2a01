"""The code environment: runs untrusted Python calls safely and fast. Never imports torch."""
