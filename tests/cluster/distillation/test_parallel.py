"""Two processes that train together, over gloo on this machine, end with the weights of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from small_targets import prompts, settings, target
from transformers import AutoModelForCausalLM

from cluster.distillation.loss import Measures
from cluster.distillation.parallel import Alone, launched
from cluster.distillation.run import assist, distill
from deployments.runtime.local import free_port

ROOT = Path(__file__).parents[3]
SETTINGS = settings(batch=7, max_steps=12, vocabulary=40)
"""Batches do not divide evenly between two."""


def one_of_two(out: Path) -> None:
    """What each process runs."""
    group = launched()
    assert group is not None
    assert group.size == 2
    if group.rank == 0:
        distill(target(), prompts(), out, SETTINGS, group=group)
    else:
        assist(target(), out, SETTINGS, group)
    group.close()


def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    """Vectors up to the rounding of float32 sums in another order, a few 1e-6.

    Matrices up to what Muon makes of that: it orthogonalises in bfloat16, so that an element on the edge of rounding
    moves by 2^-8 of a step more or less; over 12 steps of at most 2e-3 that is within 1e-4 or so. Weights are 0.15.
    """
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared["ACCELERATE_USE_CPU"] = "true"
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))  # as pytest has it
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path / "two")],
            env={**os.environ, **shared, "PYTHONPATH": path, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    distill(target(), prompts(), tmp_path / "one", SETTINGS)
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two"))
    for name, weight in one.items():
        assert float((two[name] - weight).abs().max()) < (1e-5 if weight.ndim == 1 else 4e-4), name


def test_alone_nothing_is_asked_of_others() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    assert Alone().total(tensors)[0] is tensors[0]
    assert launched() is None
    measures = Measures(5, 1.5, 2.5, 3)
    assert Measures.of(measures.as_list()) == measures


if __name__ == "__main__":
    one_of_two(Path(sys.argv[1]))
