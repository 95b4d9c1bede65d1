"""Stop strings that are special tokens: the text never shows them, so their ids end the answer."""

from __future__ import annotations

import pytest
from tiny import byte_codec

from actors.errors import InvalidSettingError
from actors.messages import GenerationRequest
from actors.orchestrator.admission import Admission
from actors.settings import SamplingSettings

CODEC = byte_codec()  # <|end|> is 0, <|user|> is 1


async def stop_ids(*stop: str, shown: bool = False, ids: tuple[int, ...] = ()) -> tuple[int, ...]:
    sampling = SamplingSettings(stop=stop, skip_special_tokens=not shown, stop_token_ids=ids)
    session = await Admission(CODEC, CODEC.vocabulary, 64).admit(GenerationRequest("x", sampling, text="hi"))
    return session.opening.sampling.stop_token_ids


async def test_a_special_token_as_a_stop_string_is_a_stop_token() -> None:
    assert await stop_ids("<|user|>", "x", "<|end|>", "<|user|>") == (1, 0)
    assert await stop_ids("<|user|>", ids=(1, 7)) == (1, 7)
    assert await stop_ids("<|us", "user|>") == ()
    assert await stop_ids("<|user|>", shown=True) == ()


async def test_a_stop_string_that_never_appears_is_refused() -> None:
    with pytest.raises(InvalidSettingError, match=r"stop_token_ids: \[1\]") as refused:
        await stop_ids("<|user|>\n")
    assert refused.value.param == "stop"
    assert await stop_ids("<|user|>\n", shown=True) == ()
