"""The programs that stages compile, with the shapes of their inputs.

A run compiles them ahead; a plan compiles them for a target machine.
"""
