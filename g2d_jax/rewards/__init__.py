"""Rewards: the score of a response and its verdict.

    text ─► extract (final answer) ─► verify.quick_verdict (exact, in process) ─► pool ─► worker (math-verify, killable)

functions.py holds the alternative: your own reward functions, by import path, with TRL's signature.
This file imports nothing, so that a worker process starts without the parts it does not need.
"""
