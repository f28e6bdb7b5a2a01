"""Environments: where problems come from, which tools exist, how a conversation continues after a
turn without a call, and what a finished conversation is worth.
"""
