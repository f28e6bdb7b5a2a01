"""The tests: helpers are imported by their full name, `from tests.e2e.miniature import ...`."""
