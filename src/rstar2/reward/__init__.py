"""Outcome-only rewards: is the boxed answer equal to the truth?"""
