"""Prompts that the target writes itself: where it begins, what is dropped and why, and that it stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from small_targets import checkpoint
from typer.testing import CliRunner

from actors.errors import ConfigError, PromptError
from cluster.distillation.own_prompts import (
    Opening,
    chat_openings,
    document_openings,
    fault_of,
    likelihood,
    write_prompts,
)
from cluster.distillation.prompts import Ids
from cluster.distillation.store import Sample
from deployments.cli.distill import app

END = 7


class Words:
    """A codec of whole words; ids 0 to 9 are set aside for marks."""

    def __init__(self, system: bool = True, template: str = "<user> {} <end> <model>") -> None:
        self.words = [f"#{n}" for n in range(10)]
        self.words[END] = "<end>"
        self.system, self.template = system, template

    def encode(self, text: str, limit: int | None = None, special: bool = True) -> Ids:
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return tuple(self.words.index(word) for word in text.split())

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        if len(messages) > 1 and not self.system:
            raise PromptError("no system messages")
        told = "".join(f"<system> {message['content']} <end> " for message in messages[:-1])
        return told + self.template.format(messages[-1]["content"])

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], tools: object = None, limit: int | None = None
    ) -> Ids:
        return self.encode(self.render_chat(messages))

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in tokens)


class Script:
    """Writes the same texts over and over; every token has the log-probability -1, or what `logp` says."""

    def __init__(self, codec: Words, texts: Sequence[str], logp: float = -1.0) -> None:
        self.codec, self.texts, self.logp, self.asked = codec, texts, logp, 0

    def sample(
        self,
        prompts: Sequence[tuple[Ids, float]],
        generator: torch.Generator,
        go_on: Callable[[int], bool] = lambda tokens: True,
    ) -> list[Sample]:
        samples = []
        for prompt, temperature in prompts:
            tokens = self.codec.encode(self.texts[self.asked % len(self.texts)])
            self.asked += 1
            logp = torch.full((len(tokens), 1), self.logp, dtype=torch.float16)
            ids = torch.tensor(tokens, dtype=torch.int32)
            samples.append(Sample(torch.tensor(prompt, dtype=torch.int32), ids, ids[:, None], logp, temperature))
        return samples


def test_the_target_begins_where_the_user_speaks() -> None:
    codec = Words()
    openings, end = chat_openings(codec, (None, "be brief"))
    assert [codec.decode(one.prefix) for one in openings] == ["<user>", "<system> be brief <end> <user>"]
    assert end == END


def test_a_template_without_a_place_for_system_prompts_is_used_without() -> None:
    openings, _ = chat_openings(Words(system=False), (None, "be brief"))
    assert [one.system for one in openings] == [None]


@pytest.mark.parametrize("template", ["<user> <end>", "<user> {}"])
def test_a_template_that_hides_the_users_words_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match="where a user's words begin and end"):
        chat_openings(Words(template=template), (None,))


def test_what_is_kept_is_asked_as_a_client_would_ask_it() -> None:
    codec = Words()
    openings, end = chat_openings(codec, ("be brief",))
    script = Script(codec, ["why is it so <end>", "how are you today <end>"])
    written = write_prompts(script, codec, openings, end, count=2, limit=99, seed=0, shard=4)
    asked = [codec.decode(prompt) for prompt in written.prompts]
    assert asked == [
        f"<system> be brief <end> <user> {text} <end> <model>" for text in ("why is it so", "how are you today")
    ]
    assert (written.turns, dict(written.faults)) == (4, {"duplicate": 2})


def test_each_fault_is_counted_by_its_name() -> None:
    codec = Words()
    openings, end = chat_openings(codec, (None,))
    loop = "again and " * 8
    good = ["what is a tide <end>", "where is my hat <end>"]
    bad = ["what is", "<end>", f"{loop}<end>", "+++ --- === ### <end>", "one two three four five <end>"]
    script = Script(codec, good + bad)
    written = write_prompts(
        script, codec, openings, end, count=9, limit=7, seed=0, shard=7, go_on=lambda kept, turns: turns < 7
    )
    assert str(written) == (
        "kept 2 of 7 turns (29%); dropped: 1 empty, 1 garbled, 1 repetitive, 1 too long, 1 unfinished"
    )


def test_a_target_that_writes_rubbish_ends_with_a_message() -> None:
    codec = Words()
    openings, end = chat_openings(codec, (None,))
    with pytest.raises(PromptError, match=r"hardly any prompts \(kept 0 of 8 turns \(0%\); dropped: 8 garbled\)"):
        write_prompts(
            Script(codec, ["a b c d <end>"], logp=-6.0), codec, openings, end, count=9, limit=99, seed=0, shard=8
        )


def test_documents_are_cut_short_and_need_no_end() -> None:
    codec = Words()
    text = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(90))
    openings = document_openings(None, (3,))
    assert openings == [Opening((3,), plain=True)]
    written = write_prompts(Script(codec, [text]), codec, openings, None, count=1, limit=99, seed=0, shard=1)
    (prompt,) = written.prompts
    assert prompt[0] == 3
    assert 8 <= len(prompt) - 1 <= 64
    assert codec.decode(prompt[1:]) == " ".join(text.split()[: len(prompt) - 1])


def test_without_a_template_and_a_first_token_prompts_must_be_given() -> None:
    with pytest.raises(ConfigError, match="give prompts"):
        document_openings(None, ())


def test_a_token_that_is_not_among_the_stored_ones_counts_as_less_likely_than_they() -> None:
    ids = torch.tensor([4, 9], dtype=torch.int32)
    stored = torch.tensor([[4, 5], [4, 5]], dtype=torch.int32)
    sample = Sample(ids, ids, stored, torch.tensor([[-0.5, -1.0], [-0.5, -2.0]], dtype=torch.float16), 1.0)
    assert likelihood(sample, 2) == pytest.approx((-0.5 + -3.0) / 2)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("How do I boil an egg?", None),
        ("Fix this code:\n\tprint(hello)", None),
        ("Hi", "empty"),
        ("the cat sat " * 5, "repetitive"),
        ("a b c \ufffd d e", "garbled"),
        ("x" * 80 + " is a word", "garbled"),
        ("{}[]()<>;:=+*/ %% && ||", "garbled"),
    ],
)
def test_faults(text: str, fault: str | None) -> None:
    assert fault_of(text.strip(), -1.5) == fault


def test_the_command_needs_no_prompts(tmp_path: Path) -> None:
    """A base model of random letters: what it writes makes no sense, and that is what is said."""
    checkpoint(tmp_path / "target", template=False)
    options = ["--layers", "2", "--vocabulary", "24", "--answer", "8", "--context", "128", "--minutes", "0.01"]
    command = [
        str(tmp_path / "target"),
        "--out",
        str(tmp_path / "draft"),
        *options,
        "--device",
        "cpu",
        "--arithmetic",
        "float32",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    assert "hardly any prompts" in result.output
    assert not (tmp_path / "draft").exists()
