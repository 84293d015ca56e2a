"""The user interface of a training run: the live display, the report, and a GIF of an episode."""
