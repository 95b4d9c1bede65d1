"""Rejected drafts on their way from a pass to the answer's step, told where margins are asked for."""

from __future__ import annotations

import pickle

from tiny import byte_codec
from toy_models import Request, ToyModel

from actors.messages import Delta, GenerationRequest, OpenSequence, VerificationResult, joined
from actors.orchestrator.session import Session
from actors.settings import SamplingSettings
from deployments.ingress.choice import Choice

CODEC = byte_codec()
V = 12


def session(**sampling: object) -> Session:
    settings = SamplingSettings.model_validate(sampling)
    opening = OpenSequence("s", (2,), settings, seed=1)
    return Session(GenerationRequest("s", settings, tokens=(2,)), opening, [2], CODEC.stream((2,), settings.stop))


def test_a_pass_tells_the_drafts_that_it_rejected() -> None:
    """Greedy, with drafts of which the first two are the model's own choices, and the third is not."""
    request = Request(ToyModel(V), SamplingSettings(temperature=0, margins=True), 5, [7])
    own = request.verify([], []).tokens
    own += request.verify(list(own), []).tokens
    right = request.verify(list(own), []).tokens[0]
    wrong = (right + 1) % V
    result = request.verify([], [*own, wrong, 3])
    assert (result.tokens, result.accepted, result.rejected) == ((*own, right), 2, (wrong, 3))
    assert pickle.loads(pickle.dumps(result)) == result
    assert request.verify([], own).rejected == ()  # all accepted
    unasked = Request(ToyModel(V), SamplingSettings(temperature=0), 5, [7])
    assert unasked.verify([], [*own, wrong, 3]).rejected == ()


def test_they_stand_before_the_token_in_their_place() -> None:
    a, b, c = CODEC.encode("abc")
    result = VerificationResult("s", 1, (a, b), 3, 1, margins=(1.0, 1.0), rejected=(c, a))
    delta = session(margins=True).deliver(result)
    assert delta.rejected == ((), (c, a))
    assert session().deliver(VerificationResult("s", 1, (a, b), 3, 1)).rejected == ()
    assert joined([delta, Delta((c,), ("c",), ("plain",), rejected=((),))]).rejected == ((), (c, a), ())
    told = Choice(0, piece=CODEC.piece).take(delta, with_tokens=True).tokens
    assert [token.get("rejected") for token in told] == [None, [{"id": c, "text": "c"}, {"id": a, "text": "a"}]]


def test_a_stop_before_the_correction_leaves_them_out() -> None:
    a, b, c = CODEC.encode("abc")
    result = VerificationResult("s", 1, (a, b), 3, 1, margins=(1.0, 1.0), rejected=(c,))
    assert session(margins=True, stop=("a",)).deliver(result).rejected == ((),)
    result = VerificationResult("s", 1, (a, b), 3, 1, margins=(1.0, 1.0), rejected=(c,))
    result.cut(1)
    assert result.rejected == ()
