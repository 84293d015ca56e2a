"""Adapters: vector environments as other libraries expect them, one module per library."""
