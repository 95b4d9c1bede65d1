"""Faults that users of speculative decoding and of OpenAI-compatible servers reported elsewhere, and the tests of each.

Every test is of the fault's whole kind, not of the one case; each must exist under the name given here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

CASES: dict[str, list[str]] = {
    "sampled from filtered scores, accepted by unfiltered ones": [
        "actors/algorithms/test_sampling.py::test_toy_field_case",
        "actors/algorithms/test_verification.py::test_toy_frequencies",
        "actors/engines/transformers/test_settings_hold.py::test_every_token_is_of_the_kept_set",
    ],
    "min_p and logit_bias reach the bonus token alone": [
        "actors/algorithms/test_verification.py::test_toy_frequencies",
        "actors/engines/transformers/test_settings_hold.py::test_a_token_biased_away_never_comes",
        "actors/engines/transformers/test_settings_hold.py::test_every_token_is_of_the_kept_set",
    ],
    "the seed is not honoured under speculation": [
        "actors/algorithms/test_verification.py::test_seeds_repeat_and_differ",
        "actors/engines/transformers/test_settings_hold.py::test_a_seed_is_an_answer",
        "actors/orchestrator/test_orchestrator.py::test_losing_the_draft_in_mid_stream_changes_nothing",
    ],
    "tiny temperatures are not greedy, or divide by zero": [
        "actors/algorithms/test_sampling.py::test_tiny_temperatures_are_greedy",
        "actors/algorithms/test_verification.py::test_tiny_temperatures_equal_greedy",
        "deployments/ingress/test_bad_input.py::test_values_out_of_range",
    ],
    "penalties count accepted, boundary or rejected tokens wrongly": [
        "actors/algorithms/test_verification.py::test_twin_and_foe",
        "actors/algorithms/test_sampling.py::test_history_follows_a_block",
        "actors/engines/transformers/test_on_off.py::test_every_setting_alone_and_combined",
    ],
    "a permuted vocabulary of equal size goes unnoticed": [
        "cluster/models/test_factory.py::test_a_permuted_vocabulary_is_named_before_anything_starts",
    ],
    "structured output breaks when drafts do not keep to it": [
        "actors/algorithms/test_grammar.py::test_blocks_follow_the_grammar_as_plain_decoding_does",
        "actors/engines/transformers/test_settings_hold.py::test_json_parses_though_the_draft_writes_code_fences",
    ],
    "text after a stop, or past max_tokens, inside a block": [
        "deployments/ingress/test_blocks.py::test_stops_and_caps_at_every_offset",
    ],
    "a stop token inside a block is missed": [
        "deployments/ingress/test_blocks.py::test_any_id_of_the_answer_can_stop_it"
    ],
    "min_tokens ends too early, or holds on too long": [
        "actors/algorithms/test_verification.py::test_min_tokens_inside_a_block",
        "deployments/ingress/test_blocks.py::test_min_tokens_holds_the_end_back_and_no_longer",
    ],
    "ignore_eos delivers more or fewer tokens than it counts": [
        "deployments/ingress/test_blocks.py::test_ignore_eos_delivers_exactly_max_tokens",
    ],
    "log-probabilities belong to other tokens": [
        "actors/algorithms/test_verification.py::test_log_probabilities_are_of_the_raw_logits",
        "actors/engines/transformers/test_settings_hold.py::test_log_probabilities_are_the_models_own_at_each_token",
        "deployments/ingress/test_blocks.py::test_log_probabilities_belong_to_their_tokens",
        "deployments/ingress/test_http.py::test_completion_logprobs_whole_and_streamed_agree",
    ],
    "characters split over tokens come out broken": [
        "deployments/ingress/test_blocks.py::test_characters_split_over_tokens_and_blocks",
        "actors/text/test_codec.py::test_split_characters_join_without_replacement",
    ],
    "stream_options.include_usage is missing or everywhere": [
        "deployments/ingress/test_http.py::test_include_usage_adds_one_last_chunk",
        "deployments/ingress/test_http.py::test_chat_stream_has_one_role_one_finish_and_the_same_text",
    ],
    "more than one finish_reason or role in a stream": [
        "deployments/ingress/test_http.py::test_chat_stream_has_one_role_one_finish_and_the_same_text",
        "deployments/ingress/test_blocks.py::test_stops_and_caps_at_every_offset",
        "deployments/ingress/test_blocks.py::test_end_of_sequence",
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_each_case_has_its_tests(case: str) -> None:
    for place in CASES[case]:
        file, name = place.split("::")
        tree = ast.parse((Path(__file__).parent / file).read_text())
        assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}, place
