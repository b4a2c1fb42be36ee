from hypothesis import settings

# A busy machine is no bug of ours: examples are few and small instead of timed.
settings.register_profile("bucketing", deadline=None)
settings.load_profile("bucketing")
