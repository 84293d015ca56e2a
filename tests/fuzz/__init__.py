"""Fuzzing: inputs that no program of memlane writes, as ``python -m tests.fuzz`` tries them."""
