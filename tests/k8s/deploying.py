"""Deploys the base's application to a running cluster as the operator would, and leaves it there."""

from __future__ import annotations

import sys

import ray
import yaml
from ray import serve

from deployments.app import build


def main(address: str, manifest: str) -> None:
    with open(manifest, encoding="utf-8") as file:
        config = yaml.safe_load(yaml.safe_load(file)["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    ray.init(address=address, namespace="serve", log_to_driver=False)
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    serve.run(build(application["args"]), name=application["name"], route_prefix=application["route_prefix"])
    print("deployed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
