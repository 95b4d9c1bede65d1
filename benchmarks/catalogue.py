"""The benchmarks by name. Nothing is imported before a benchmark is chosen, so that listing them is instant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`main` of benchmarks/`module`.py measures it; goal: empty where a benchmark has none."""

    module: str
    measures: str
    goal: str = ""
    named: bool = False
    """Whether `main` takes the benchmark's name as its first argument, because it measures several."""


def _pipeline(measures: str, goal: str) -> Benchmark:
    return Benchmark("pipeline", measures, goal, named=True)


BENCHMARKS: dict[str, Benchmark] = {
    "one-sequence": _pipeline("four ways of decoding one sequence, emulated hardware", "tree 3.4x of plain"),
    "many": _pipeline("64 sequences on two pairs, against what single ones predict", "a share of 0.9"),
    "overhead": _pipeline("what orchestrator and links add to a target pass", "2 ms at 64 sequences, 2 ms of growth"),
    "scaling": _pipeline("throughput of 1, 2 and 4 target replicas", "3.6x with 4"),
    "saturation": _pipeline("speculation on over off where tokens in a pass are dear", "0.98x"),
    "demo": _pipeline(
        "the demo pair on this CPU against plain decoding and transformers' assisted generation",
        "chat 1.25x and 1.3x, edits 2x",
    ),
    "pipeline": _pipeline("the six above, in one report", "theirs"),
    "doors": Benchmark(
        "doors", "what HTTP adds to the first token, and 200 streams at once", "5 ms, and every stream held"
    ),
    "batch": Benchmark("batch", "10,000 short prompts through the Python handle", "target 95 % busy"),
    "memory": Benchmark("memory", "resident memory before and after 500 requests of the demo"),
    "faults": Benchmark(
        "faults",
        "what faults and changes of size cost clients",
        "nothing lost or changed, pauses of 2 s besides the detection of a silence",
    ),
    "scale": Benchmark("scale", "a thousand replicas on paper: a day of traffic, and the bottleneck"),
    "soak": Benchmark("soak", "half an hour of load and faults: what grows", "no answer lost or changed"),
    "proof": Benchmark("proof", "every claim of exactness, with figure and p-value", "none fails"),
    "proof-model": Benchmark(
        "proof_model", "1,000 prompts of a real model, speculation on against off", "none differs"
    ),
    "draft": Benchmark(
        "draft",
        "the demo draft on prompts of no training source, by kind",
        "greedy agreement 0.55, a step 1/8 of a target pass",
    ),
    "hidden-states": Benchmark(
        "hidden_states", "a draft that reads the demo target's hidden states: agreement by depth, and its costs"
    ),
    "same-bits": Benchmark("same_bits", "a deterministic target in random passes, and what it costs", "none differs"),
    "algorithms": Benchmark("algorithms", "the acceptance rules' share of a target pass", "5 %"),
    "cpu-block": Benchmark("cpu_block", "a target pass of a few tokens on a CPU, next to one of one token"),
    "cohorts": Benchmark("cohorts", "one cohort of sequences against two that take turns, simulated"),
    "vllm-pair": Benchmark(
        "vllm_pair",
        "vLLM alone, with its own draft, with a remote one (needs vLLM)",
        "1.2x of its own draft, 0.98x of vLLM alone at 16, exchange 2 ms",
    ),
    "vllm-saturation": Benchmark(
        "vllm_saturation", "16 sequences at once on vLLM: what each part takes (needs vLLM)", "0.98x of vLLM alone"
    ),
}
