"""A model while it is served: its door, its programs and memory, warm-up, versions, and grids fitted anew."""
