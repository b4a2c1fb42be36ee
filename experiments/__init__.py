"""servax.experiments."""
