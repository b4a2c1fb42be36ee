"""HTTP: the OpenAI-compatible routes, Open Inference Protocol v2 over REST, metrics."""
