"""A local Ray cluster with two replicas, one of which is killed under load; prints what happened as JSON.

Run by `test_ray_serve`, in a process of its own: Ray's threads and warnings stay out of the test process.
"""

import json
import socket
import sys
import time
import urllib.request

import numpy as np
import ray
from ray import serve
from servax.server.ray_serve import application

REQUESTS = 300
UNTIL_S = 60.0


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def replicas():
    names = ray.util.list_named_actors(all_namespaces=True)
    return [one for one in names if one["name"].startswith("SERVE_REPLICA::default#servax#")]


def load(handle):
    """Send requests with a few hundred outstanding, kill a replica in between; outcomes in order."""
    sent = []
    for number in range(REQUESTS):
        sent.append(handle.infer.remote([{"x": np.full(1 + number % 30, 1.0, np.float32)}]))
        if number == REQUESTS // 2:
            victim = replicas()[0]
            ray.kill(ray.get_actor(victim["name"], namespace=victim["namespace"]))
    outcomes = []
    for number, response in enumerate(sent):
        try:
            (answer,) = response.result(timeout_s=UNTIL_S)
            outcomes.append("right" if answer["sum"] == 2.0 * (1 + number % 30) else "wrong")
        except TimeoutError:
            outcomes.append("lost")
        except Exception as error:
            outcomes.append(type(error).__name__)
    return outcomes


def post(port, length):
    body = {"inputs": [{"name": "x", "shape": [1, length], "datatype": "FP32", "data": [1.0] * length}]}
    url = f"http://127.0.0.1:{port}/v2/models/toy/infer"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())["outputs"][0]["data"]


def main(folder):
    port = free_port()
    environment = {"PYTHONPATH": folder, "JAX_PLATFORMS": "cpu"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    handle = serve.run(
        application(
            model="ray_toy:toy",
            store=f"{folder}/store",
            num_replicas=2,
            drain_s=2.0,
            ray_actor_options={"num_cpus": 0.2},
        )
    )
    found = {"before": len(replicas()), "http": post(port, 3), "outcomes": load(handle)}
    until = time.monotonic() + UNTIL_S
    while len(replicas()) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    found |= {"after": len(replicas()), "again": post(port, 5)}
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(found))


main(sys.argv[1])
