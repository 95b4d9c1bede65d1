"""Sampling through a server: vLLM on paper, in the shape that it was recorded in, and a real small Outrider."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_vllm import RECORDED, FakeVllm
from small_targets import EOS, checkpoint, llama, prompts, target
from typer.testing import CliRunner

from actors.errors import ConfigError, RequestError, UnavailableError
from cluster.distillation.store import NEVER
from deployments.cli.distant_target import NEUTRAL, DistantTarget


def distant(server: FakeVllm, **options: Any) -> DistantTarget:
    common = {"answer": 12, "context": 40, "top": 5, "pause_s": 0.0, "transport": server.transport(), "model": "tiny"}
    return DistantTarget("http://vllm/v1", **(common | options))


def shape(value: Any) -> Any:
    """Keys and kinds; lists by their first item, scores by id as one."""
    if isinstance(value, dict):
        if value and all(key.startswith("token_id:") for key in value):
            return {"token_id": "float"}
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def test_the_server_on_paper_answers_in_vllms_shape() -> None:
    request = RECORDED["request"]
    told = FakeVllm(llama())._completion(request)
    assert shape(told) == shape(RECORDED["response"])


def test_the_request_is_the_one_that_vllm_was_given() -> None:
    server = FakeVllm(llama())
    distant(server, top=2, answer=8).sample([((3, 4), 0.5)], torch.Generator())
    # vLLM ignored the field `speculation` when this was recorded; it is Outrider's, and not sent to others any more.
    assert server.asked[0].keys() == (RECORDED["request"].keys() - {"speculation"}) | NEUTRAL.keys()
    assert server.asked[0].items() >= {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}.items()


def test_what_vllm_told_is_read() -> None:
    """Best first, whatever was drawn; what was not told is filled up."""
    server = FakeVllm(llama())
    server._completion = lambda body: RECORDED["response"]  # type: ignore[method-assign]
    (sample,) = distant(server).sample([((3, 4), 0.5)], torch.Generator())
    assert sample.prompt.tolist() == [3, 4]
    assert sample.answer.tolist() == [7, 2]
    assert sample.top_ids.tolist() == [[9, 4, 7, 0, 0], [2, 9, 0, 0, 0]]
    assert sample.top_logp.tolist() == [[-0.25, -1.25, -1.5, NEVER, NEVER], [-0.125, -2.5, NEVER, NEVER, NEVER]]
    assert sample.temperature == 0.5


def test_greedy_answers_are_the_models_own() -> None:
    plain, asked = llama(), prompts(6)
    for prompt, sample in zip(
        asked, distant(FakeVllm(llama())).sample([(p, 0.0) for p in asked], torch.Generator()), strict=True
    ):
        text = [*prompt, *sample.answer.tolist()]
        with torch.no_grad():
            logp = plain(input_ids=torch.tensor([text])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        best, ids = logp.topk(5)
        assert sample.answer.tolist() == ids[:, 0].tolist()
        torch.testing.assert_close(sample.top_logp.float(), best, atol=5e-3, rtol=1e-3)  # float16
        assert len(sample.answer) == 12 or int(sample.answer[-1]) == EOS


def test_the_same_generator_gives_the_same_answers_at_any_concurrency() -> None:
    asked = [(p, 1.0) for p in prompts(9)]
    one, many = FakeVllm(llama()), FakeVllm(llama())
    first = distant(one, concurrency=1).sample(asked, torch.Generator().manual_seed(4))
    second = distant(many, concurrency=3).sample(asked, torch.Generator().manual_seed(4))
    other = distant(many).sample(asked, torch.Generator().manual_seed(5))
    assert [s.answer.tolist() for s in first] == [s.answer.tolist() for s in second]
    assert [s.answer.tolist() for s in first] != [s.answer.tolist() for s in other]
    assert one.most_at_once == 1


def test_errors_that_may_pass_are_tried_again() -> None:
    server = FakeVllm(llama(), failures=[503, 429, 503])
    assert len(distant(server).sample([(p, 0.0) for p in prompts(4)], torch.Generator())) == 4
    with pytest.raises(UnavailableError, match="http://vllm does not answer: busy"):
        distant(FakeVllm(llama(), failures=[503] * 3), retries=2).sample([((3, 4), 0.0)], torch.Generator())
    with pytest.raises(RequestError, match="busy"):
        distant(FakeVllm(llama(), failures=[400])).sample([((3, 4), 0.0)], torch.Generator())


def test_it_ends_when_it_is_told_to() -> None:
    """Nothing is cut before there is an answer; what is done then is kept."""
    server = FakeVllm(llama())
    found = distant(server, concurrency=1).sample([(p, 0.0) for p in prompts(8)], torch.Generator(), lambda n: False)
    assert 1 <= len(found) < 8


def test_who_serves_the_target_is_told_by_what_it_says() -> None:
    distant(FakeVllm(llama()), model=None).check(target(), prompts(1)[0])
    with pytest.raises(ConfigError, match=r"does not serve tiny, or tells .* off by"):
        distant(FakeVllm(llama(7))).check(target(), prompts(1)[0])
    with pytest.raises(ConfigError, match="--logprobs-mode raw_logprobs"):
        distant(FakeVllm(llama(), processed=True)).check(target(), prompts(1)[0])
    with pytest.raises(ConfigError, match="serves one, two: say which one with --served-model"):
        distant(FakeVllm(llama(), names=("one", "two")), model=None).check(target(), prompts(1)[0])


def test_a_server_that_tells_no_ids_is_refused() -> None:
    server = FakeVllm(llama())
    server._completion = lambda body: {"choices": [{"text": "x", "logprobs": None}]}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="does not tell token ids"):
        distant(server).sample([((3, 4), 0.0)], torch.Generator())


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_draft_is_distilled_through_a_running_outrider(ray_port: int, tmp_path: Path) -> None:
    from cluster.config.deployment import load_config
    from deployments.cli.distill import app
    from deployments.runtime.local import application

    folder = checkpoint(tmp_path / "target")
    raw = {
        "name": "distant",
        "model_id": "tiny",
        "target": {"model": str(folder), "settings": {"slots": 8, "context": 64}},
        "draft": {"kind": "prompt_lookup", "settings": {"slots": 8, "context": 64}},
        "ingress": {"port": ray_port, "route_prefix": "/distant", "batch_folder": None},
    }
    questions = tmp_path / "prompts.txt"
    questions.write_text("\n".join(f"{a} {b}?" for a in ("how", "why", "who") for b in ("is it", "do we", "are they")))
    paths = [str(folder), "--prompts", str(questions), "--out", str(tmp_path / "draft")]
    size = ["--layers", "2", "--vocabulary", "24", "--answer", "8", "--context", "64", "--minutes", "0.05"]
    with application(load_config(raw)) as url:
        told = DistantTarget(url, answer=8, context=64, top=4).sample([((3, 4, 5), 0.0)], torch.Generator())
        result = CliRunner().invoke(app, [*paths, *size, "--device", "cpu", "--through", url])
    assert result.exit_code == 0, result.output
    assert f"{url} answers the prompts" in result.output
    assert json.loads((tmp_path / "draft" / "card.json").read_text())["sampled_tokens"] > 0
    with torch.no_grad():
        text = torch.tensor([[3, 4, 5, *told[0].answer.tolist()]])
        own = llama()(input_ids=text).logits[0, 2:-1].argmax(-1).tolist()
    assert told[0].answer.tolist() == own  # an end of text included
    assert len(own) == 8 or own[-1] == EOS
