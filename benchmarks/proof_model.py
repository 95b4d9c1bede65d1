"""Speculation on against off on a real model: 1,000 prompts, every sampling setting alone and in random combination.

    python -m benchmarks proof-model                     # the demo model in float64: no near-ties, nothing may differ
    python -m benchmarks proof-model --dtype float32     # near-ties (margins below 1e-3) are counted and allowed

Each prompt is answered by plain decoding first. Then all are answered again with drafts that are right, wrong or rigged
(scripted from the first answers), verified to a random depth, while offers come late, twice or not at all. Compared are
tokens, log-probabilities, and how and why an answer ends. Exits with 1 if anything differs outside near-ties.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from actors.algorithms.grammar import GrammarCompiler
from actors.engines.transformers.target import TransformersTarget
from actors.settings import TargetSettings
from actors.text.answer_comparison import TOLERANCE
from benchmarks.support import options
from benchmarks.support.provenance import heading
from cluster.config.deployment import Dtype
from cluster.models import demo_draft
from cluster.models.references import DEMO_TARGET, load_tokenizer
from cluster.models.weights import load_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from on_off import Sweep, sweep


def prompts_of(tokenizer: object, count: int, length: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Beginnings of held-out prompts: a different one or another cut each time, 3 to `length` tokens."""
    texts = json.loads((Path(demo_draft.__file__).parent / "held-prompts.json").read_text())
    found: set[tuple[int, ...]] = set()
    while len(found) < count:
        ids = tokenizer.encode(" ".join(rng.sample(texts, 2)))  # type: ignore[attr-defined]
        start = rng.randrange(max(1, len(ids) - length))
        found.add(tuple(ids[start : start + rng.randrange(3, length + 1)]))
    return sorted(found, key=lambda _: rng.random())


def grammars() -> list[str]:
    from llguidance import LLMatcher

    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    return [LLMatcher.grammar_from_json_schema(json.dumps(schema)), LLMatcher.grammar_from_regex("[A-Z][a-z ]+[.!]")]


def run(model_id: str, dtype: Dtype, *, prompts: int, tokens: int = 12, length: int = 10, seed: int = 1) -> Sweep:
    """Compare on `prompts` prompts of at most `length` tokens, with answers of at most `tokens`."""
    tokenizer = load_tokenizer(model_id)
    model = load_model(model_id, dtype=dtype)
    compiler = GrammarCompiler(tokenizer.backend_tokenizer.to_str(), model.vocabulary_size, model.eos)  # type: ignore[attr-defined]
    target = TransformersTarget(model, TargetSettings(slots=16, context=length + tokens + 1), compiler)
    rng = random.Random(seed)
    tolerance = 0.0 if dtype == "float64" else TOLERANCE
    asked = prompts_of(tokenizer, prompts, length, rng)
    return sweep(target, asked, rng, tokens=tokens, grammars=grammars(), tolerance=tolerance)


def figures(found: Sweep) -> str:
    return (
        f"{found.settings} settings alone and in combination; {found.proposed} draft tokens proposed, {found.accepted} "
        f"accepted ({found.branches} of them alternatives), paths of {min(found.lookaheads)} to "
        f"{max(found.lookaheads)}; {found.errors} requests leave no "
        "token to choose and end alike"
    )


def main(argv: Sequence[str]) -> int:
    parser = options.parser("proof-model", __doc__)
    parser.add_argument("--model", default=DEMO_TARGET)
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--length", type=int, default=10, help="most tokens of a prompt")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    print(heading(f"{given.model}, {given.dtype}"), flush=True)
    started = time.perf_counter()
    found = run(
        given.model,
        given.dtype,
        prompts=given.prompts,
        tokens=given.tokens,
        length=given.length,
        seed=given.seed,
    )
    print(f"{found.tally}\n{figures(found)}; {time.perf_counter() - started:.0f} s")
    for line in found.tally.different:
        print(f"  {line}")
    return 0 if found.tally.same else 1
