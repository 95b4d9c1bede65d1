"""`outrider demo`: a real model behind both tiers on this machine, and a table against plain decoding."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.errors import ConfigError
from actors.messages import Delta
from actors.text.answer_comparison import Comparison
from cluster.config.deployment import DeploymentConfig, load_config
from deployments.cli.explain import Explainer
from deployments.cli.speed_comparison import Summary, compare, measure
from deployments.client.client import Client, connect
from deployments.client.timing import Timing
from deployments.runtime.local import application, check_port, free_port, ray_cluster, stop_if_asked, wait_for_interrupt

CONFIG = Path(__file__).parents[1] / "demo.yaml"
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "List five facts about glaciers.",
    "Explain in simple words why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
)
MAX_TOKENS = 64
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 1}


def run(once: bool = False, port: int | None = None) -> int:
    """Run the demo. Returns 0, or 1 when speculation changed a token outside a near-tie. Raises ConfigError."""
    from cluster.models.factory import prepare
    from cluster.models.references import progress_bar

    console = Console()
    config = _config(port)
    with progress_bar() as progress:
        prepare(config, progress)
    with console.status("Starting Ray") as status, ray_cluster(), application(config, status.update) as url:
        status.stop()
        with connect(url) as client:
            exact = _compare(console, client, config)
        _show_use(console, config, url)
        if not once:
            console.print("Serving until Ctrl-C.")
            wait_for_interrupt()
    return 0 if exact else 1


def _config(port: int | None) -> DeploymentConfig:
    """The demo's configuration on a port that is free, with cores that this machine has."""
    config = load_config(CONFIG)
    host = config.ingress.host
    if port is not None:
        check_port(host, port)
    else:
        try:
            port = config.ingress.port
            check_port(host, port)
        except ConfigError:
            port = free_port(host)
    return config.model_copy(update={"ingress": config.ingress.model_copy(update={"port": port})})


def _compare(console: Console, client: Client, config: DeploymentConfig) -> bool:
    """Answer every prompt four times, plain and with speculation in turn, so that a slow moment hits both."""
    explainer = Explainer(console)
    plain, fast = Summary(), Summary()
    console.print("\nAnswers with speculation; the colours say where each token came from:")
    explainer.legend()
    for speculation in (False, True):  # warm both ways up; not counted
        _answer(client, PROMPTS[0], speculation, max_tokens=8)
    for prompt in PROMPTS:
        stop_if_asked()
        console.print(f"\n[bold]{prompt}[/bold]")
        plain.answers.append(_answer(client, prompt, False))
        fast.answers.append(_answer(client, prompt, True, explainer))
        console.print()
    sampled_plain = [_answer(client, prompt, False, **SAMPLED) for prompt in PROMPTS[:2]]
    sampled_fast = [_answer(client, prompt, True, **SAMPLED) for prompt in PROMPTS[:2]]
    greedy = compare(plain.answers, fast.answers)
    sampled = compare(sampled_plain, sampled_fast)
    console.print(_table(plain, fast, greedy, sampled))
    console.print(_conditions(config), style="dim")
    for difference in greedy.different + sampled.different:
        console.print(difference, style="red")
    return greedy.same and sampled.same


def _answer(
    client: Client,
    prompt: str,
    speculation: bool,
    explainer: Explainer | None = None,
    max_tokens: int = MAX_TOKENS,
    **sampling: Any,
) -> Timing:
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, **sampling}
    messages = [{"role": "user", "content": prompt}]
    show = explainer.show if explainer is not None else _hide
    return measure(client, messages, show, speculation=speculation, **settings)


def _hide(delta: Delta) -> None:
    pass


def _table(plain: Summary, fast: Summary, greedy: Comparison, sampled: Comparison) -> Table:
    table = Table("", "plain decoding", "speculation", title="Plain decoding and speculation on this machine")
    both = (plain, fast)
    table.add_row("time to first token (median)", *[f"{it.first_token_s * 1e3:.0f} ms" for it in both])
    table.add_row("inter-token latency p50", *[f"{it.gap_s(0.5) * 1e3:.1f} ms" for it in both])
    table.add_row("inter-token latency p99", *[f"{it.gap_s(0.99) * 1e3:.1f} ms" for it in both])
    table.add_row("tokens/s", *[f"{it.tokens_per_s:.1f}" for it in both])
    table.add_row("acceptance length", *[f"{it.acceptance_length:.2f}" for it in both])
    table.add_section()
    table.add_row("tokens identical, greedy", "-", _identical(greedy))
    table.add_row("tokens identical, temperature 0.8", "-", _identical(sampled))
    return table


def _identical(found: Comparison) -> str:
    ties = f", {found.ties} answers part at a near-tie" if found.ties else ""
    return f"{'yes' if found.same else 'no'} ({found.tokens} compared{ties})"


def _conditions(config: DeploymentConfig) -> str:
    target, draft = config.target.resources, config.draft.resources
    return (
        f"{len(PROMPTS)} prompts, one at a time, at most {MAX_TOKENS} tokens each, greedy. "
        f"{config.target.model} in {config.target.dtype} on core {_cores(target.cores)}, "
        f"{config.draft.model} on core {_cores(draft.cores)}, one thread each; "
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}. "
        "Tokens that arrive together share their time."
    )


def _cores(cores: tuple[int, ...] | None) -> str:
    return ",".join(map(str, cores)) if cores else "any"


def _show_use(console: Console, config: DeploymentConfig, url: str) -> None:
    body = '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
    console.print("\nTry it:\n")
    console.print(
        f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        "\nfrom openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="none")\n'
        f'stream = client.chat.completions.create(model="{config.model_id}", stream=True,\n'
        '    messages=[{"role": "user", "content": "Hello!"}])\n'
        "for chunk in stream:\n"
        '    print(chunk.choices[0].delta.content or "", end="")\n',
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
