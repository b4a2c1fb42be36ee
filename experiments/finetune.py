"""Fine-tuning MiniLM on pairs of texts through `@servax.bucketed`: schemes by speed and compilations.

Claim: with the shapes of a training loop padded to buckets, a step compiles a few times instead of once a
shape, the losses are the same, and a fitted ladder computes more real tokens a second than powers of two.

    python -m servax.experiments.finetune --quick --json finetune.json

The pairs are the two halves of one text, as in the independent cropping of Contriever (Izacard et al.,
2022); the other texts of the batch are the negatives. Batches are drawn from pools sorted by length, as
training loops do.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from numpy.typing import NDArray

from ..bucketing import Scheme, exact, fitted, parse_scheme, single
from ..jit_cache import bucketed
from .minilm import load_minilm
from .reporting import machine, print_table, write_json
from .traces import load_texts

LIMIT = 128
FEWEST_WORDS = 8
POOL_BATCHES = 16
SCALE = 20.0
LEARNING_RATE = 2e-5
COLUMNS = {
    "scheme": "scheme",
    "compiles": "compilations|,d",
    "compile_s": "s compiling|.1f",
    "waste": "padding|.1%",
    "steady_tokens_per_s": "real tokens/s, warm|,.0f",
    "tokens_per_s": "with compiling|,.0f",
    "mean_loss": "mean loss|.5f",
    "loss_gap": "loss gap|.1e",
}
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Two int32 `(pairs, length)` arrays, padded with 0 to the longest text of the batch, and no further."""

    left: Ids
    right: Ids

    @property
    def real(self) -> int:
        """Tokens that are no padding."""
        return int((self.left != 0).sum() + (self.right != 0).sum())


def pair_batches(pairs: int, seed: int) -> list[PairBatch]:
    """One epoch of batches of pairs; the last one of each pool of sorted texts is short."""
    tokenizer = load_minilm().tokenizer
    halves: list[tuple[str, str]] = []
    for text in load_texts(seed=seed):
        words = text.text.split()
        if len(words) >= FEWEST_WORDS:
            middle = len(words) // 2
            halves.append((" ".join(words[:middle]), " ".join(words[middle:])))
    left = [tokenizer.truncate(ids, LIMIT) for ids in tokenizer.encode([one for one, _ in halves])]
    right = [tokenizer.truncate(ids, LIMIT) for ids in tokenizer.encode([two for _, two in halves])]
    longest = [max(len(one), len(two)) for one, two in zip(left, right, strict=True)]
    rng = np.random.default_rng(seed)
    pool = POOL_BATCHES * pairs - pairs // 2
    batches: list[PairBatch] = []
    for begin in range(0, len(longest), pool):
        places = sorted(range(begin, min(begin + pool, len(longest))), key=longest.__getitem__)
        chosen = [places[start : start + pairs] for start in range(0, len(places), pairs)]
        batches += [
            _batch([left[one] for one in chosen[place]], [right[one] for one in chosen[place]])
            for place in rng.permutation(len(chosen)).tolist()
        ]
    return batches


def _batch(left: Sequence[Ids], right: Sequence[Ids]) -> PairBatch:
    shape = len(left), max(map(len, (*left, *right)))
    arrays = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for array, texts in zip(arrays, (left, right), strict=True):
        for row, ids in enumerate(texts):
            array[row, : len(ids)] = ids
    return PairBatch(*arrays)


def make_step(
    apply: Callable[..., Any], scheme: Scheme, pairs: int, optimizer: optax.GradientTransformation
) -> Any:
    """A training step that pads to the scheme's lengths; batches of fewer pairs pad to `pairs`.

    Args:
        apply: `apply(params, ids=, mask=)["embedding"]` is float32 `(batch, width)`.
        scheme: Lengths that are compiled, up to `LIMIT`.
        pairs: Rows of every program.
        optimizer: What turns gradients into updates.

    Returns:
        `step(params, state, left, right)` to new parameters, new state and the mean loss of a pair; the
        buffers of parameters and state are taken over.
    """

    def loss_of(params: Any, left: jax.Array, right: jax.Array, real: jax.Array) -> jax.Array:
        # A spare row counts as text: the norm of an empty one is 0, where the root has no gradient.
        one, two = (
            apply(params, ids=ids, mask=(ids != 0) | ~real[:, None])["embedding"] for ids in (left, right)
        )
        scores = jnp.where(real[None, :], SCALE * one @ two.T, -1e9)
        own = jnp.diagonal(jax.nn.log_softmax(scores, axis=-1))
        return -jnp.sum(jnp.where(real, own, 0.0)) / jnp.sum(real, dtype=jnp.float32)

    @bucketed(
        dims={"left": "batch, length", "right": "batch, length"},
        masks={"real": "batch"},
        limits={"batch": pairs, "length": LIMIT},
        scheme={"batch": single(), "length": scheme},
        donate=("params", "state"),
    )
    def step(params: Any, state: Any, left: Any, right: Any, real: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, left, right, real)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(
    apply: Callable[..., Any], weights: Any, scheme: Scheme, batches: Sequence[PairBatch], pairs: int
) -> tuple[dict[str, Any], list[float]]:
    """Run the batches through one scheme; what it took, and the losses. The weights stay as they are."""
    optimizer = optax.adamw(LEARNING_RATE)
    step = make_step(apply, scheme, pairs, optimizer)
    # Copies, since the step takes the buffers over.
    params = jax.tree.map(jnp.array, weights)
    state = optimizer.init(params)
    losses: list[float] = []
    warm_s, warm_tokens, compiling_s = 0.0, 0, 0.0
    for batch in batches:
        before, begin = step.compiles, time.perf_counter()
        params, state, loss = step(params, state, batch.left, batch.right)
        losses.append(float(loss))
        seconds = time.perf_counter() - begin
        if step.compiles == before:
            warm_s, warm_tokens = warm_s + seconds, warm_tokens + batch.real
        else:
            compiling_s += seconds
    real = sum(batch.real for batch in batches)
    computed = 2 * step.computed_elements
    return {
        "compiles": step.compiles,
        "compile_s": compiling_s,
        "waste": 1 - real / computed,
        "steady_tokens_per_s": warm_tokens / warm_s if warm_s else None,
        "tokens_per_s": real / (warm_s + compiling_s),
        "mean_loss": sum(losses) / len(losses),
    }, losses


def schemes(epoch: Sequence[PairBatch], programs: int) -> dict[str, Scheme]:
    """What is compared. Fitting may see all lengths: a training set is known before the first step."""
    return {
        f"fitted:{programs}": fitted([batch.left.shape[1] for batch in epoch], programs),
        "powers_of_two:16": parse_scheme("powers_of_two:16"),
        "linear:16": parse_scheme("linear:16"),
        "single": single(),
        "exact": exact(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train through every scheme, print the table and write it."""
    parser = argparse.ArgumentParser(
        prog="python -m servax.experiments.finetune", description="Fine-tune through bucket schemes."
    )
    parser.add_argument("--quick", action="store_true", help="12 steps of 4 pairs, three schemes")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--steps", type=int, help="steps a scheme (64, quick 12)")
    parser.add_argument("--pairs", type=int, help="pairs a batch (16, quick 4)")
    parser.add_argument("--programs", type=int, default=4, help="rungs of the fitted ladder (4)")
    parser.add_argument("--seed", type=int, default=0, help="order of texts and batches (0)")
    options = parser.parse_args(arguments)
    steps = options.steps or (12 if options.quick else 64)
    pairs = options.pairs or (4 if options.quick else 16)
    epoch = pair_batches(pairs, options.seed)
    chosen = schemes(epoch, options.programs)
    if options.quick:
        chosen = {
            name: scheme for name, scheme in chosen.items() if not name.startswith(("single", "linear"))
        }
    model = load_minilm()
    rows = compare(model.apply, dict(model.params), chosen, epoch[:steps], pairs)
    tokens = sum(batch.real for batch in epoch[:steps])
    title = f"{steps} steps of up to {pairs} pairs, {tokens:,} real tokens"
    note = "loss gap: largest difference from the loss of the first scheme at any step"
    print_table(title, COLUMNS, rows, note)
    if options.json is not None:
        settings = {"steps": steps, "pairs": pairs, "seed": options.seed, "limit": LIMIT}
        write_json(options.json, {"machine": machine(), "settings": settings, "rows": rows})


def compare(
    apply: Callable[..., Any],
    weights: Any,
    chosen: Mapping[str, Scheme],
    batches: Sequence[PairBatch],
    pairs: int,
) -> list[dict[str, Any]]:
    """One row a scheme; each starts from the same weights and sees the same batches."""
    rows: list[dict[str, Any]] = []
    first: list[float] = []
    for name, scheme in chosen.items():
        row, losses = train(apply, weights, scheme, batches, pairs)
        first = first or losses
        gap = max(abs(one - two) for one, two in zip(first, losses, strict=True))
        rows.append({"scheme": name, **row, "loss_gap": gap})
    return rows


if __name__ == "__main__":
    main()
