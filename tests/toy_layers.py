"""Two dense layers, in padded and in packed rows, for the scripts that tests run in processes of their own.

Those put this folder on the path; JAX sees the devices that their environment names.
"""

import jax.numpy as jnp
import numpy as np

SEGMENTS = 4
RNG = np.random.default_rng(0)
WEIGHTS = {
    "in": RNG.normal(size=(4, 8)).astype(np.float32),
    "out": RNG.normal(size=(8, 4)).astype(np.float32),
}


def items_of(*lengths):
    return [{"x": RNG.normal(size=(length, 4)).astype(np.float32)} for length in lengths]


def dense(params, x):
    return jnp.einsum("blh,ho->blo", jnp.tanh(jnp.einsum("blf,fh->blh", x, params["in"])), params["out"])


def padded(params, *, x, mask):
    kept = jnp.where(mask[..., None], dense(params, x), 0.0)
    return {"sum": kept.sum(1), "each": kept}


def packed(params, *, x, segment_ids, positions):
    kept = jnp.where((segment_ids > 0)[..., None], dense(params, x), 0.0)
    mine = segment_ids[:, None] == jnp.arange(1, SEGMENTS + 1, dtype=jnp.int32)[None, :, None]
    return {"sum": jnp.where(mine[..., None], kept[:, None], 0.0).sum(2), "each": kept}
