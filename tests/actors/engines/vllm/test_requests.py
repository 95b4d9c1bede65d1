"""Openings as vLLM requests: what vLLM schedules by, what its worker decides by, and what plain decoding refuses."""

from __future__ import annotations

import json

import pytest

from actors.engines.vllm.requests import facts, plain_request, request, room
from actors.errors import InvalidSettingError
from actors.messages import OpenSequence
from actors.settings import SamplingSettings

EOS = (2, 9)


def opening(committed: tuple[int, ...] = (), **sampling: object) -> OpenSequence:
    return OpenSequence("a", (5, 6, 7), SamplingSettings(**sampling), 42, committed)  # type: ignore[arg-type]


def test_the_worker_reads_what_was_asked() -> None:
    asked = opening(
        (8,), temperature=0.7, logit_bias={3: -100.0}, min_p=0.1, stop=("x",), prediction=(1, 2), bad_words=((1, 2),)
    )
    sent = request(asked, EOS, 100)
    over_the_wire = json.loads(json.dumps(sent.params["extra_args"]))
    known = facts(over_the_wire)
    assert known is not None
    assert (known.sequence, known.seed, known.prompt) == ("a", 42, 3)
    assert known.sampling == asked.sampling.model_copy(update={"stop": (), "prediction": ()})
    assert sent.tokens == (5, 6, 7, 8)
    assert facts(None) is None


@pytest.mark.parametrize(
    ("sampling", "committed", "context", "room"),
    [
        ({"max_tokens": 20}, (), 100, 20),
        ({"max_tokens": 20}, (8, 8), 100, 18),
        ({"max_tokens": 20}, (), 10, 7),
    ],
)
def test_vllm_stops_where_the_answer_stops(
    sampling: dict[str, int], committed: tuple[int, ...], context: int, room: int
) -> None:
    assert request(opening(committed, **sampling), EOS, context).params["max_tokens"] == room


def test_a_resumed_answer_may_be_over() -> None:
    assert room(opening((8,), max_tokens=1), 100) == 0
    assert room(opening((8, 8), max_tokens=9), 5) == 0


def test_ends_of_text_are_stops_unless_ignored() -> None:
    assert request(opening(stop_token_ids=(4,)), EOS, 100).params["stop_token_ids"] == [2, 4, 9]
    assert request(opening(stop_token_ids=(4,), ignore_eos=True), EOS, 100).params["stop_token_ids"] == [4]


def test_plain_decoding_passes_settings_on_or_refuses_them() -> None:
    params = plain_request(opening(temperature=1e-9, top_k=-1, logit_bias={3: 1.0}, min_tokens=4), EOS, 100).params
    assert (params["temperature"], params["top_k"], params["logit_bias"], params["min_tokens"]) == (0.0, 0, {3: 1.0}, 4)
    assert "extra_args" not in params
    for name, value in {"margins": True, "grammar": "{}", "bad_words": ((1,),)}.items():
        with pytest.raises(InvalidSettingError):
            plain_request(opening(**{name: value}), EOS, 100)
