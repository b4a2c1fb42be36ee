# mypy: ignore-errors
"""ONNX Runtime behind a bare web server: no batching, as a first version of a service is written."""

import uvicorn
from encoder import Encoder, port
from fastapi import FastAPI
from pydantic import BaseModel

app, encoder = FastAPI(), Encoder()


class Body(BaseModel):
    """One text."""

    text: str


@app.post("/embed")
def embed(body: Body):
    """A vector; run in FastAPI's thread pool, so that the event loop stays free."""
    return {"y": encoder([body.text])[0].tolist()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=port(), log_level="warning", access_log=False)
