# mypy: ignore-errors
"""The same encoder under LitServe, with its dynamic batching."""

import litserve
from encoder import MAX_BATCH, Encoder, port


class Embed(litserve.LitAPI):
    """One worker process."""

    def setup(self, device):
        """Loads the model in the worker."""
        self.encoder = Encoder()

    def decode_request(self, request):
        """The text of a body."""
        return request["text"]

    def batch(self, inputs):
        """Texts of a batch; the encoder pads."""
        return inputs

    def predict(self, texts):
        """Vectors of a batch."""
        return self.encoder(texts)

    def unbatch(self, output):
        """One vector a request."""
        return list(output)

    def encode_response(self, output):
        """The answer of a request."""
        return {"y": output.tolist()}


if __name__ == "__main__":
    api = Embed(max_batch_size=MAX_BATCH, batch_timeout=0.005)
    litserve.LitServer(api, accelerator="cpu").run(
        host="127.0.0.1", port=port(), generate_client_file=False, log_level="warning"
    )
