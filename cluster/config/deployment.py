"""One model of a whole deployment, read from YAML or built in Python.

Everything a deployment can say is here, composed of the parts' own settings; unknown keys and combinations that
cannot work are refused when the configuration is read, with a message that says what to change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from actors.errors import ConfigError
from actors.settings import (
    DraftSettings,
    MemorySettings,
    OrchestratorSettings,
    Rule,
    Settings,
    TargetSettings,
    problems,
)
from cluster.scaling.policies import LOOK_BACK_S, DraftGoals, TargetGoals

Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Proxy = Literal["serve", "haproxy"]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Autoscaling(Settings):
    """Bounds and pace of one tier's replicas."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Fewest replicas; 0 is for drafts only."""
    max_replicas: Annotated[int, Field(ge=1)] = 4
    """Most replicas."""
    upscale_delay_s: Seconds = 10.0
    """How long the policy must ask for more replicas before one is added."""
    downscale_delay_s: Seconds = 120.0
    """How long the policy must ask for fewer before one goes."""
    look_back_s: PositiveSeconds = LOOK_BACK_S
    """Over how long the policies see means of what replicas report; a cluster's replicas report every
    RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S (5 s where `outrider` starts it, 10 s where nothing is set)."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})")
        return self


class Resources(Settings):
    """What one replica of a tier takes from a node (one rank of it, when tensor parallel)."""

    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPU cores, as Ray counts them."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs, as Ray counts them; a fraction shares one."""
    memory_gib: Annotated[float, Field(ge=0)] = 0.0
    """Memory that Ray sets aside; 0 sets none aside."""
    accelerator_type: str | None = None
    """Ray's name of a GPU type, for example `H100`."""
    labels: dict[str, str] = {}
    """Ray node labels that the node must carry."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """Torch threads; None leaves torch's own choice."""
    cores: tuple[int, ...] | None = None
    """Pin the model thread's process to these cores (CPU engines on one machine)."""
    nice: Annotated[int, Field(ge=0, le=19)] = 0
    """How far the model thread steps back for others on its cores: a draft beside a target's scheduler should."""


class Health(Settings):
    """When a replica's actor is taken for dead and replaced."""

    period_s: PositiveSeconds = 2.0
    """How often the replica looks after its actor."""
    ping_timeout_s: PositiveSeconds = 10.0
    """It does not answer for this long."""
    stuck_after_s: PositiveSeconds = 60.0
    """Its model thread has work and has not moved for this long: longer than any pass, first compilations included.
    Nor may it be silent for so long while it builds its model."""
    start_timeout_s: PositiveSeconds = 300.0
    """It gives no first sign of life for this long after it was placed; building its model has no limit."""


class Tier(Settings):
    """What both tiers share."""

    resources: Resources = Resources()
    replicas: Annotated[int, Field(ge=0)] = 1
    """How many, where the tier does not scale by itself."""
    autoscaling: Autoscaling | None = None
    """Replaces `replicas` when given."""
    health: Health = Health()
    drain_s: Seconds = 30.0
    """How long a replica that is to go may finish its sequences; those left then move to another one."""


class DefaultSampling(Settings):
    """What a request that does not name these gets; what neither names is OpenAI's default, which changes nothing."""

    from_model: bool = True
    """Take what the model's generation_config.json says, as vLLM does; the settings below go before it."""
    temperature: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    """0: the most likely token. 1: as the model says."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of the most likely tokens, so many as have this probability together. 1: all."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """So many of the most likely tokens. 0: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Tokens at least this likely, relative to the most likely one. 0: all."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """Divides the logits of tokens that are there already. 1: none."""


class TargetTier(Tier):
    """The model whose words are served."""

    engine: Literal["transformers", "vllm", "emulated"] = "transformers"
    """What runs the target: any model of transformers, vLLM on GPUs, or emulated hardware."""
    model: str = "demo:smollm2-135m"
    """A local path, a hub id, `demo:...`, or `emulated:...`."""
    dtype: Dtype | Literal["auto"] = "float32"
    """`auto`, for vLLM only, is the checkpoint's own: right for quantised ones."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share one copy of the model."""
    engine_kwargs: dict[str, Any] = {}
    """Passed to the engine as they are: for vLLM its own arguments, for example `quantization`,
    `gpu_memory_utilization`, or `distributed_executor_backend: ray` for ranks on several nodes."""
    if_incompatible: Literal["refuse", "plain"] = "refuse"
    """vLLM only: what to do when the start-up check finds that its internals have moved. `plain` decodes without
    speculation, and seeded answers are then vLLM's own."""
    deterministic: bool = False
    """Compute a token's logits in an order of sums that its own position fixes, the same to the last bit in any block
    and batch, so that no near-tie can part an answer from the one without speculation. Slower; for the transformers
    engine on a CPU, and passes then verify one path of each sequence, not trees. The loaded model is checked, and what
    cannot keep the promise does not start."""
    default_sampling: DefaultSampling = DefaultSampling()
    settings: TargetSettings = TargetSettings()
    goals: TargetGoals = TargetGoals()
    """What autoscaling aims for."""

    @property
    def ranks_are_actors(self) -> bool:
        """Has every tensor-parallel rank an actor, and so a bundle, of its own? vLLM's usually share a process tree."""
        return self.engine != "vllm" or self.engine_kwargs.get("distributed_executor_backend") == "ray"


class DraftChoice(Settings):
    """Which draft is run: what can be exchanged while everything else goes on (see `outrider rollout`)."""

    model: str
    """A local path or a hub id."""
    dtype: Dtype | Literal["auto"] = "float32"
    engine_kwargs: dict[str, Any] = {}


class DraftTier(Tier):
    """The model, or method, that guesses."""

    kind: Literal[
        "model", "prompt_lookup", "suffix", "early_exit", "retokenised", "hidden_states", "emulated", "none"
    ] = "model"
    """retokenised: a model with another tokenizer than the target's; early_exit: the target's own first layers;
    hidden_states: one layer that reads the target's hidden states (EAGLE-3's form), for targets on transformers;
    suffix: what was said before, which needs the extra `suffix`."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """What runs a draft of kind `model`. vllm is for drafts on a GPU, quantised ones and many sequences; transformers
    has less to do per step, which is what counts for a draft of a few layers and for one sequence."""
    model: str = "demo:draft"
    """A local path, a hub id, `demo:draft`, or `emulated:...`."""
    dtype: Dtype | Literal["auto"] = "float32"
    """`auto`, for drafts on vLLM only, is the checkpoint's own."""
    compile: bool = False
    """On a GPU, compile the steps of the transformers engine before they are recorded as CUDA graphs. The first step of
    each shape then takes up to a minute."""
    layers: Annotated[int, Field(ge=1)] | None = None
    """early_exit: how many of the target's first layers."""
    engine_kwargs: dict[str, Any] = {}
    """Passed to the engine as they are."""
    memory: MemorySettings | None = None
    """suffix: how much is remembered, and for whom; none: the defaults."""
    settings: DraftSettings = DraftSettings()
    goals: DraftGoals = DraftGoals()
    """What autoscaling aims for."""

    @model_validator(mode="after")
    def _remembers(self) -> Self:
        if self.memory is not None and self.kind != "suffix":
            raise ValueError(f"draft.memory is for drafts of kind 'suffix', not '{self.kind}'")
        return self


class Ingress(Settings):
    """The HTTP front."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but a loopback address serves the network: set `keys_file`."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """TCP port of the HTTP server."""
    route_prefix: str = "/"
    """Path under which all routes lie."""
    proxy: Proxy = "serve"
    """haproxy: a third of the processor time per streamed token (see deployments/runtime/haproxy.py). For a cluster
    that `outrider serve` starts; elsewhere set RAY_SERVE_ENABLE_HA_PROXY=1 for all of Ray's processes."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Ingress replicas."""
    labels: dict[str, str] = {}
    """Ray node labels that the node must carry."""
    keys_file: str | None = None
    """API keys (see `outrider keys`); read again when it changes. None: everybody may ask."""
    running: Annotated[int, Field(ge=1)] | None = None
    """Most answers at once, per replica; the rest waits its turn here, fairly between keys. None: all go through."""
    queue: Annotated[int, Field(ge=0)] = 1024
    """Most requests that wait for their turn, per priority; one more is told to come back."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 1024 * 1024
    """The longest request body, other than an uploaded file."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call from browsers."""
    access_log: bool = False
    """One line of JSON per request, without keys and prompts."""
    batch_folder: str | None = "~/.local/state/outrider"
    """Files and batches of /v1/files and /v1/batches are kept here, in a folder of the application's name and `port`,
    and taken up again after a restart. All ingress replicas must see the same folder. None: no such routes."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 1024 * 1024
    """The longest file of /v1/files."""
    closed_schemas: bool = True
    """Objects of JSON schemas (response_format, structured_outputs, forced tools) hold only the keys that they name,
    where `additionalProperties` does not say otherwise. False: as JSON Schema has it, with any other keys."""

    def batches(self, application: str) -> Path | None:
        """The batch folder of this application on this port: another server of the same user has other batches."""
        return (
            None if self.batch_folder is None else Path(self.batch_folder).expanduser() / f"{application}-{self.port}"
        )


class Orchestrators(Settings):
    """The orchestrators."""

    embedded: bool = True
    """Every ingress replica runs one of its own, a hop less for HTTP; `replicas` then serve Python handles."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Orchestrators besides the embedded ones."""
    labels: dict[str, str] = {}
    """Ray node labels that the node must carry."""
    settings: OrchestratorSettings = OrchestratorSettings()


class Tracing(Settings):
    """Traces of requests through OpenTelemetry."""

    endpoint: str | None = None
    """OTLP over HTTP, for example http://collector:4318/v1/traces. None: no traces."""
    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the requests, chosen by their ids."""
    service: str = "outrider"
    """The service's name in traces."""


class Recording(Settings):
    """Served answers kept as training data for the next draft (`outrider distill --traffic FILE`). Off unless given."""

    folder: str
    """One SQLite file per orchestrator, readable by its user alone: token ids of prompts and answers."""
    secret_file: str
    """16 to 64 bytes; the key of the hash under which an API key's share is kept, so that it can be deleted."""
    tokens: Annotated[int, Field(ge=1)] = 5_000_000
    """Most tokens kept per file; the oldest answers make room."""


class DeploymentConfig(Settings):
    """A whole deployment."""

    name: str = "outrider"
    """Application name in Ray Serve, and prefix of the actors' names."""
    model_id: str = "smollm2-135m-instruct"
    """What clients call the model."""
    rule: Rule = "coupled"
    """How drafts are decided upon; every rule but `typical` is exact."""
    target: TargetTier = TargetTier()
    draft: DraftTier = DraftTier()
    orchestrator: Orchestrators = Orchestrators()
    ingress: Ingress = Ingress()
    tracing: Tracing = Tracing()
    recording: Recording | None = None
    """Served answers kept as training data for the next draft; none: off."""

    @model_validator(mode="after")
    def _remembers_no_noise(self) -> Self:
        if self.rule in ("rejection", "block") and self.draft.kind == "suffix":
            raise ValueError(
                f"draft.kind 'suffix' goes with rule 'coupled' or 'typical', not '{self.rule}': a remembered answer of "
                "the same seed would be judged by the noise that made it"
            )
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        target, draft = self.target, self.draft
        if (target.engine == "emulated") != target.model.startswith("emulated:"):
            raise ValueError(
                "target.engine 'emulated' goes with target.model 'emulated:PRESET', and neither without the other"
            )
        if draft.kind == "emulated" and target.engine != "emulated":
            raise ValueError(
                "draft.kind 'emulated' needs target.engine 'emulated': its tokens mean nothing to a real model"
            )
        if target.engine == "emulated" and draft.kind not in ("emulated", "none"):
            raise ValueError(f"draft.kind '{draft.kind}' cannot follow an emulated target; use 'emulated' or 'none'")
        if target.autoscaling is not None and target.autoscaling.min_replicas == 0:
            raise ValueError("target.autoscaling.min_replicas must be at least 1: with no target nothing sees demand")
        if (draft.kind == "early_exit") != (draft.layers is not None):
            raise ValueError("draft.layers is needed for draft.kind 'early_exit', and only there")
        if target.deterministic and target.engine == "vllm":
            raise ValueError(
                "target.deterministic is the embedded engine's; vLLM has an option of its own for it (batch invariance)"
            )
        if target.deterministic and target.tensor_parallel_size > 1:
            raise ValueError(
                "target.deterministic goes with target.tensor_parallel_size 1: the order in which ranks are summed "
                "is their library's choice"
            )
        if target.engine == "transformers" and target.tensor_parallel_size > 1 and target.resources.num_gpus > 1:
            raise ValueError("target.resources is per rank: with tensor_parallel_size > 1 set num_gpus to at most 1")
        if draft.engine == "vllm" and draft.kind != "model":
            raise ValueError(f"draft.engine 'vllm' runs drafts of kind 'model', not '{draft.kind}'")
        if draft.compile and (draft.engine != "transformers" or draft.kind not in ("model", "early_exit")):
            raise ValueError("draft.compile is for drafts of kind 'model' or 'early_exit' on the transformers engine")
        if target.engine != "vllm" and target.dtype == "auto":
            raise ValueError("target.dtype 'auto' goes with target.engine 'vllm' only")
        if draft.engine != "vllm" and draft.dtype == "auto":
            raise ValueError("draft.dtype 'auto' goes with draft.engine 'vllm' only")
        if draft.kind != "none" and draft.settings.context < target.settings.context:
            raise ValueError(
                f"draft.settings.context ({draft.settings.context}) is below target.settings.context "
                f"({target.settings.context}): the draft could not follow long sequences"
            )
        if self.rule in ("rejection", "block") and target.engine == "emulated":
            raise ValueError(f"rule '{self.rule}' needs a real model; an emulated target decides by 'coupled'")
        return self

    @model_validator(mode="after")
    def _hidden_states_fit(self) -> Self:
        if self.draft.kind != "hidden_states":
            return self
        if self.target.engine != "transformers":
            raise ValueError(
                "draft.kind 'hidden_states' needs target.engine 'transformers': what a vLLM worker class may read "
                "of its model's hidden states has not been tried"
            )
        if self.target.deterministic:
            raise ValueError("draft.kind 'hidden_states' does not go with target.deterministic: its passes are cut up")
        if self.draft.model.startswith("demo:"):
            raise ValueError("draft.kind 'hidden_states' needs a draft.model that outrider distill, or somebody, made")
        if self.target.tensor_parallel_size > 1:
            raise ValueError("draft.kind 'hidden_states' has not been tried with tensor-parallel targets")
        if self.rule in ("rejection", "block"):
            raise ValueError(
                f"draft.kind 'hidden_states' goes with rule 'coupled' or 'typical': what it says after a prefix "
                f"depends on when the target's features came, which rule '{self.rule}' has not been proven for"
            )
        return self

    @property
    def draft_choice(self) -> DraftChoice:
        """The part of the draft tier that can be exchanged."""
        draft = self.draft
        return DraftChoice(model=draft.model, dtype=draft.dtype, engine_kwargs=draft.engine_kwargs)

    def with_draft(self, choice: DraftChoice) -> DeploymentConfig:
        """The same with another draft. Raises ConfigError when it does not go with the rest."""
        raw = self.model_dump(mode="json")
        raw["draft"] |= choice.model_dump(mode="json")
        return load_config(raw)

    def resolved_target(self) -> TargetSettings:
        """The target's settings with the deployment's rule."""
        return self.target.settings.model_copy(update={"rule": self.rule})

    def resolved_draft(self) -> DraftSettings:
        """The draft's settings with the deployment's rule."""
        return self.draft.settings.model_copy(update={"rule": self.rule})


def load_config(source: str | Path | dict[str, Any]) -> DeploymentConfig:
    """Read a configuration from a YAML file, or from a mapping (Ray Serve's `args`).

    Raises ConfigError with one line per problem, each naming the key.
    """
    if isinstance(source, dict):
        return _validated(source, "the configuration")
    path = Path(source)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds no mapping of settings")
    if "applications" in raw:  # the same file that `serve deploy` takes
        raw = _serve_args(raw, path)
    return _validated(raw, str(path))


def _serve_args(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The `args` of a file of `serve deploy`, with what the file says to Serve itself: address, prefix and name.

    Raises ConfigError where the two differ.
    """
    applications = raw["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"{path}: `applications` must list exactly one application")
    application = applications[0]
    args, http = application.get("args") or {}, raw.get("http_options") or {}
    ingress = args.get("ingress") or {}
    if not all(isinstance(group, dict) for group in (args, http, ingress)):
        return dict(args) if isinstance(args, dict) else {"args": args}  # refused by name when it is validated
    said = (
        ("applications[0].name", application.get("name"), args, "name"),
        ("applications[0].route_prefix", application.get("route_prefix"), ingress, "route_prefix"),
        ("http_options.host", http.get("host"), ingress, "host"),
        ("http_options.port", http.get("port"), ingress, "port"),
    )
    args, changed = dict(args), dict(ingress)
    for name, value, group, key in said:
        if value is None:
            continue
        own = "name" if group is not ingress else f"ingress.{key}"
        if group.get(key, value) != value:
            raise ConfigError(f"{path}: {name} is {value!r}, and args.{own} {group[key]!r}: say it once", own)
        (changed if group is ingress else args)[key] = value
    return {**args, "ingress": changed} if changed else args


def _validated(raw: dict[str, Any], name: str) -> DeploymentConfig:
    try:
        return DeploymentConfig.model_validate(raw)
    except ValidationError as error:
        found = problems(error, DeploymentConfig().model_dump(), "configuration")
        raise ConfigError(f"{name}: " + "; ".join(found)) from error
