"""Rewards: what a response is worth, and how sure we are.

    text ─► extract (final answer) ─► verify.quick_verdict (exact, in process) ─► pool ─► worker (math-verify, killable)

functions.py holds another way in: reward functions of the user's own, by import path, with TRL's
signature. Nothing is imported here, so that a worker process starts without the parts it does not
need.
"""
