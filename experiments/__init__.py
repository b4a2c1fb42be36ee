"""Experiments: one claim a script, on the packaged traces and texts; see README.md."""
