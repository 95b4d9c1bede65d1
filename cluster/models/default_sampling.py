"""What a request that names no temperature, top_p, ... gets: the same by HTTP, from Python, and on the command line.

As in vLLM (its `generation_config: auto`), the model's own generation_config.json counts, whatever its `do_sample`
says; the deployment's configuration has the last word, and what neither names is as OpenAI has it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from actors.messages import GenerationRequest
from actors.settings import SamplingSettings
from cluster.config.deployment import DefaultSampling, DeploymentConfig

Values = Mapping[str, float]
"""Values of SamplingSettings, by their names; what is left out is SamplingSettings' own default."""


def default_sampling(config: DeploymentConfig) -> dict[str, float]:
    """Of a deployment. Raises ModelNotFoundError when its target is not there."""
    said = config.target.default_sampling
    values: dict[str, float] = {}
    if said.from_model and config.target.engine != "emulated":
        values = of_model(config.target.model)
    return values | said.model_dump(exclude={"from_model"}, exclude_none=True)


def of_model(reference: str) -> dict[str, float]:
    """What the model's generation_config.json says. Raises ModelNotFoundError."""
    from cluster.models.references import fetch

    return of_checkpoint(fetch(reference))


def of_checkpoint(folder: Path) -> dict[str, float]:
    """The same of a checkpoint's folder. A file that is missing, damaged or out of range says nothing."""
    try:
        told = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    names = [name for name in DefaultSampling.model_fields if name != "from_model"]
    values: dict[str, float] = {}
    for name in names if isinstance(told, dict) else ():
        value = told.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                values[name] = getattr(SamplingSettings.model_validate({name: value}), name)
            except ValidationError:  # what transformers takes for "off", for example a top_p of 0
                continue
    return values


def completed(request: GenerationRequest, sampling: Values) -> GenerationRequest:
    """The request with `sampling` where it says nothing itself; unset fields stay unset on their way from clients."""
    missing = {name: value for name, value in sampling.items() if name not in request.sampling.model_fields_set}
    return replace(request, sampling=request.sampling.model_copy(update=missing)) if missing else request
