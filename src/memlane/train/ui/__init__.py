"""What a person sees of a training run: live display, report, animation."""
