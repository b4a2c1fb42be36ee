# mypy: ignore-errors
"""The same encoder under mosec, with its dynamic batching."""

from encoder import MAX_BATCH, Encoder
from mosec import Server, Worker


class Embed(Worker):
    """One worker process."""

    def __init__(self):
        self.encoder = Encoder()

    def forward(self, data):
        """A batch of bodies to a batch of answers."""
        return [{"y": vector.tolist()} for vector in self.encoder([one["text"] for one in data])]


if __name__ == "__main__":
    server = Server()
    server.append_worker(Embed, num=1, max_batch_size=MAX_BATCH, max_wait_time=5)
    server.run()
