"""Whose a request is travels with its sequence to every replica that it is opened on."""

from __future__ import annotations

from actors.messages import GenerationRequest
from actors.orchestrator.admission import Admission
from actors.settings import SamplingSettings
from actors.text.emulated_codec import EmulatedCodec


async def test_the_owner_of_a_request_is_the_tenant_of_its_sequence_also_when_it_moves() -> None:
    admission = Admission(EmulatedCodec(1000), vocabulary=1000, context=64)
    request = GenerationRequest("r", SamplingSettings(seed=1), tokens=(5, 6), owner="team")
    session = await admission.admit(request)
    assert session.opening.tenant == "team"
    assert session.resumed() == session.opening
