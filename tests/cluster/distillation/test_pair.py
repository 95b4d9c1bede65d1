"""Overlap of two models, against what full forward passes and the definitions give; and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_targets import EOS, VOCABULARY, checkpoint, llama, prompts

from actors.algorithms.noise import gumbel
from actors.engines.transformers.causal_lm import CausalLM
from cluster.distillation.pair import expected_length, overlap, plain_answers
from deployments.cli import main


def model(seed: int = 0, vocabulary: torch.Tensor | None = None) -> CausalLM:
    return CausalLM(llama(seed).double(), name="tiny", eos=(EOS,), vocabulary=vocabulary)


@torch.no_grad()
def rows(seed: int, text: list[int], first: int) -> torch.Tensor:
    logits: torch.Tensor = llama(seed).double()(input_ids=torch.tensor([text])).logits[0]
    return logits[first - 1 : -1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_model_overlaps_with_itself(temperature: float) -> None:
    found = overlap(model(), model(), prompts(5), temperature=temperature, tokens=8)
    assert found.overlap == pytest.approx(1.0)
    assert (found.first, found.corrections) == (1.0, dict.fromkeys((1, 2, 4, 8), 0.0))


def test_overlap_is_what_the_definition_says() -> None:
    asked, temperature = prompts(4), 0.9
    found = overlap(model(), model(1), asked, temperature=temperature, tokens=6, seed=3)
    masses, ranks = [], []
    for n, answer in enumerate(plain_answers(model(), asked, temperature=temperature, tokens=6, seed=3)):
        text = [*asked[n], *answer]
        p = (rows(0, text, len(asked[n])) / temperature).softmax(-1)
        q = (rows(1, text, len(asked[n])) / temperature).log_softmax(-1)
        for i, token in enumerate(answer):
            g = gumbel(
                torch.tensor([3 + n]), torch.tensor([len(asked[n]) + i]), torch.arange(VOCABULARY), dtype=torch.float64
            )
            assert int((p[i].log() + g[0]).argmax()) == token
            masses.append(1 - 0.5 * float((p[i] - q[i].exp()).abs().sum()))  # 1 - TV
            ranks.append((q[i] + g[0]).argsort(descending=True).tolist().index(token))
    wrong = [rank for rank in ranks if rank]
    assert found.positions == len(ranks)
    assert found.overlap == pytest.approx(sum(masses) / len(masses))
    assert found.first == pytest.approx(1 - len(wrong) / len(ranks))
    assert found.corrections == pytest.approx({n: sum(r <= n for r in wrong) / len(wrong) for n in (1, 2, 4, 8)})


def test_a_token_that_the_draft_lacks_is_never_guessed() -> None:
    found = overlap(model(), model(vocabulary=torch.tensor([EOS])), prompts(4), temperature=1.0, tokens=6)
    assert found.overlap < 0.2
    assert found.corrections[8] < 0.2


def test_expected_length() -> None:
    assert expected_length(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert expected_length(1.0, 4) == 5
    assert expected_length(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model and its first two layers, under every rule; then what is wrong with a call."""
    folder = str(checkpoint(tmp_path / "model"))
    asked = tmp_path / "prompts.txt"
    asked.write_text("ab cd\nxyz\nhello there\n")
    plot = tmp_path / "plot.png"
    call = ["acceptance", folder, folder, "--layers", "2", "--prompts", str(asked), "--max-tokens", "6"]

    def outrider(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main.main(list(arguments))
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    code, out, _ = outrider(*call, "--plot", str(plot), "--json")
    told = json.loads(out)
    assert code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert [rule["rule"] for rule in told["rules"]] == ["coupled", "rejection", "block", "typical"]
    assert 0 < told["pair"]["overlap"] < 1
    code, out, _ = outrider(*call, "--plot", str(plot), "--temperature", "0")
    assert code == 0
    assert "1 - TV(p, q)" in out
    assert "every rule" in out
    for wrong, says in (
        (["acceptance", folder, "--prompts", str(asked)], "name both models"),
        (["acceptance", folder, folder, "--prompts", "./nowhere"], "no file of prompts"),
        (["acceptance", folder, folder, "--prompts", str(asked), "--max-tokens", "500"], "leaves no room"),
        (["acceptance", folder, "demo:gpt9", "--prompts", str(asked)], "no demo model"),
    ):
        code, _, err = outrider(*wrong)
        assert (code, len(err.splitlines())) == (2, 1)
        assert says in err
