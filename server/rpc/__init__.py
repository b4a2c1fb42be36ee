"""gRPC: Open Inference Protocol v2, health and reflection."""
