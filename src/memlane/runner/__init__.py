"""The runner: collector processes or threads beside a learner, supervised."""
