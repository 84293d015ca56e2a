"""Lanes: structures in shared memory with roles. Ring, replay, weights and statistics."""
