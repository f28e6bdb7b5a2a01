"""Bounds of a call's files, in each direction. Imports nothing, so that all three packages can."""

MAX_FILES = 64
MAX_FILES_BYTES = 16 << 20
"""Contents of all files of a call together."""
MAX_PATH_BYTES = 255
MAX_PATH_PARTS = 16
