"""What a hidden-state draft is worth on prompts that it was not trained on: by depth, and by the real engines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actors.engines.transformers.causal_lm import CausalLM
from actors.engines.transformers.feature_draft import FeatureDraft, FeatureLM
from actors.engines.transformers.feature_layer import FeatureModel
from actors.engines.transformers.features import FeatureTap
from actors.engines.transformers.slots import SlotRow
from actors.engines.transformers.target import TransformersTarget
from actors.settings import DraftSettings, Rule, TargetSettings, TreeSettings
from cluster.distillation import export
from cluster.distillation.evaluation import Acceptance, Agreement, greedy_answers, measure
from cluster.distillation.feature_student import unrolled
from cluster.distillation.prompts import Ids

if TYPE_CHECKING:
    from cluster.distillation.feature_student import FeatureStudent
    from cluster.distillation.job import Job
    from cluster.distillation.trainer import Trainer

RULES: tuple[tuple[Rule, float], ...] = (("coupled", 0.0), ("coupled", 0.8), ("coupled", 1.0), ("typical", 1.0))
"""Those that hidden-state drafts are served with."""
DEPTHS = 4


@torch.inference_mode()
def agreement_by_depth(
    target: CausalLM,
    draft: FeatureModel,
    vocabulary: Tensor | None,
    prompts: Sequence[Ids],
    tokens: int,
    *,
    depths: int = DEPTHS,
    slots: int = 16,
    told: bool = True,
) -> list[Agreement]:
    """How often the draft's likeliest token is the target's, along greedy answers of at most `tokens` tokens.

    At depth 1 it has the target's features of all before, at depth n own ones of the last n - 1 positions; the prefix
    is the target's at every depth. told: False gives it none of the target's features, as one that was never told any.
    """
    tap = FeatureTap(target.module, draft.shape.layers, draft.fc.weight)
    agreed, count = [0] * depths, 0
    for start in range(0, len(prompts), slots):
        batch = prompts[start : start + slots]
        for prompt, answer in zip(batch, greedy_answers(target, batch, tokens), strict=True):
            text = [*prompt, *answer]
            target.run(target.cache(slots=1, context=len(text)), [SlotRow(0, text, 0)], [len(text) - 1])
            features = tap.fused(range(len(text))).to(draft.norm.weight.dtype)[None] * float(told)  # [1, T, E]
            goal = torch.tensor(answer, device=features.device)
            ids = torch.tensor([text], device=features.device)
            for depth, hidden in enumerate(unrolled(draft, ids, features, depths)):
                best = (hidden[0, len(prompt) - 1 : -1] @ draft.head.to(hidden.dtype).T).argmax(-1)
                agreed[depth] += int(((best if vocabulary is None else vocabulary[best]) == goal).sum())
            count += len(answer)
    tap.close()
    return [Agreement(one, count) for one in agreed]


def feature_acceptance(
    target: CausalLM,
    draft: FeatureLM,
    prompts: Sequence[Ids],
    *,
    rule: Rule,
    temperature: float,
    tokens: int,
    lookahead: int = 4,
    seed: int = 0,
) -> Acceptance:
    """As evaluation.acceptance: taking turns, with every pass's features in time."""
    context, slots = max(map(len, prompts)) + tokens + lookahead + 1, len(prompts)
    tree = TreeSettings(width=1, branching=1, depth=lookahead, nodes=lookahead + 1)
    tap = FeatureTap(target.module, draft.module.shape.layers, draft.module.fc.weight)
    found = measure(
        TransformersTarget(target, TargetSettings(slots=slots, context=context, rule=rule), features=tap),
        FeatureDraft(
            draft, DraftSettings(slots=slots, context=context, prefill_chunk=slots * context, tree=tree, rule=rule)
        ),
        prompts,
        rule=rule,
        temperature=temperature,
        tokens=tokens,
        lookahead=lookahead,
        seed=seed,
    )
    tap.close()
    return found


def appraise_features(
    job: Job, student: FeatureStudent, trainer: Trainer, held: Sequence[Ids], name: str
) -> dict[str, Any]:
    """The draft's card: as appraisal.appraise has it, and agreement by depth."""
    settings, module = job.settings, job.target.module
    target = CausalLM(module, name=job.target.reference, eos=job.target.eos)
    trained = copy.deepcopy(student.module).eval().to(module.device, module.dtype)
    depths = agreement_by_depth(target, trained, student.vocabulary, held, settings.evaluation_tokens)
    draft = FeatureLM(trained, name=name, eos=job.target.eos, vocabulary=student.vocabulary)
    rows: list[Acceptance] = []
    for rule, temperature in RULES:
        job.tell("evaluation", (len(rows) + 1) / (len(RULES) + 1))
        rows.append(
            feature_acceptance(
                target,
                draft,
                held[: settings.evaluation_prompts],
                rule=rule,
                temperature=temperature,
                tokens=settings.evaluation_tokens,
                lookahead=settings.lookahead,
                seed=settings.seed,
            )
        )
    job.tell("evaluation", 1.0)
    card = export.card(
        target=job.target,
        student=student,
        settings=settings,
        sampled_tokens=job.store.tokens,
        steps=trainer.step_count,
        positions=trainer.positions,
        seconds=(job.state.sampling_seconds, job.state.training_seconds),
        agreement=depths[0],
        acceptance=rows,
        held=len(held),
    )
    return card | {
        "feature_layers": list(student.module.shape.layers),
        "greedy_agreement_by_depth": [round(one.share, 4) for one in depths],
    }
