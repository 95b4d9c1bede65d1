"""Emulated engines: exactness, the cache contract, time and faults, with a clock that is moved by hand."""

from __future__ import annotations

import threading

import pytest

from actors.engines.emulated.engines import EmulatedDraft, EmulatedTarget
from actors.engines.emulated.language import Agreement, Language, expected_tokens
from actors.engines.emulated.presets import (
    GPUS,
    MODELS,
    DraftSpec,
    TargetSpec,
    draft_spec,
    preset_names,
    preset_times,
    target_spec,
)
from actors.engines.emulated.timing import Fault, Faults, Pacer
from actors.engines.protocol import Expand, Proposal, Row
from actors.errors import ConfigError, EngineError, InvalidSettingError, ModelNotFoundError, OverloadedError
from actors.messages import OpenSequence
from actors.settings import DraftSettings, SamplingSettings, TargetSettings, TreeSettings

PROMPT = (3, 1, 4, 1, 5)
GREEDY = SamplingSettings(temperature=0)


class HandClock:
    """A clock that only sleeping moves; every sleep is `slack` too long."""

    def __init__(self, slack: float = 0.0) -> None:
        self.now = 100.0
        self.slack = slack

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.slack


def opening(sequence: str = "s", sampling: SamplingSettings = GREEDY, committed: tuple[int, ...] = ()) -> OpenSequence:
    return OpenSequence(sequence, PROMPT, sampling, seed=11, committed=committed)


def target(spec: TargetSpec | None = None, clock: HandClock | None = None) -> tuple[EmulatedTarget, HandClock]:
    clock = clock or HandClock()
    return EmulatedTarget(spec or TargetSpec(), TargetSettings(), clock=clock, sleep=clock.sleep), clock


def draft(spec: DraftSpec | None = None, settings: DraftSettings | None = None) -> tuple[EmulatedDraft, HandClock]:
    clock = HandClock()
    return EmulatedDraft(spec or DraftSpec(), settings or DraftSettings(), clock=clock, sleep=clock.sleep), clock


def decode(model: EmulatedTarget, committed: tuple[int, ...], drafts: tuple[int, ...] = ()) -> tuple[int, ...]:
    row = Row(0, (committed[-1], *drafts), len(committed) - 1, Proposal(drafts, (0.5,) * len(drafts)))
    outcome = model.forward([row])[0]
    assert outcome is not None
    model.record(0, outcome.tokens)
    return outcome.tokens


@pytest.mark.parametrize("sampling", [GREEDY, SamplingSettings()])
def test_a_target_says_what_its_language_says_whatever_is_drafted(sampling: SamplingSettings) -> None:
    model, _ = target()
    model.attach(0, opening(sampling=sampling))
    truth = expected_tokens(PROMPT, 12, None if sampling.greedy else 11, Language())
    model.forward([Row(0, PROMPT[:3], 0, decide=False)])
    first = model.forward([Row(0, PROMPT[3:], 3)])[0]
    assert first is not None
    assert (first.tokens, first.accepted) == (truth[:1], 0)
    model.record(0, first.tokens)
    said = truth[:1]
    # Wholly right, wrong at the second, wrong at the first, none.
    for drafts, tokens in (
        (truth[1:4], truth[1:5]),
        ((truth[5], truth[6] + 1, truth[7]), truth[5:7]),
        ((truth[7] + 1, truth[8]), truth[7:8]),
        ((), truth[8:9]),
    ):
        assert decode(model, PROMPT + said, drafts) == tokens
        said += tokens


def test_a_target_resumes_after_tokens_another_one_committed() -> None:
    truth = expected_tokens(PROMPT, 6, None, Language())
    model, _ = target()
    model.attach(0, opening(committed=truth[:4]))
    outcome = model.forward([Row(0, PROMPT + truth[:4], 0)])[0]
    assert outcome is not None
    assert outcome.tokens == truth[4:5]


def test_rows_that_a_cache_could_not_serve_are_errors() -> None:
    model, _ = target()
    with pytest.raises(EngineError, match="holds no sequence"):
        model.forward([Row(0, PROMPT, 0)])
    model.attach(0, opening())
    for row, complaint in (
        (Row(0, PROMPT[2:], 2), "never run"),
        (Row(0, (9, 9, 9, 9, 9), 0), "not the committed prefix"),
        (Row(0, PROMPT[:4], 0), "asked to decide at 4"),
        (Row(0, (*PROMPT, 7), 0, Proposal((7,), (0.5,)), decide=False), "unfinished prompt"),
    ):
        with pytest.raises(EngineError, match=complaint):
            model.forward([row])
    # What was cached past a rejected draft does not count.
    outcome = model.forward([Row(0, PROMPT, 0)])[0]
    assert outcome is not None
    model.record(0, outcome.tokens)
    said = decode(model, PROMPT + outcome.tokens, (outcome.tokens[0] + 1, 5, 5))
    assert len(said) == 1
    with pytest.raises(EngineError, match="never run"):
        model.forward([Row(0, (1,), len(PROMPT) + 3)])


def test_settings_that_would_be_ignored_are_refused() -> None:
    model, _ = target()
    for sampling in (
        SamplingSettings(logit_bias={1: 5.0}),
        SamplingSettings(allowed_token_ids=(1, 2)),
        SamplingSettings(grammar="x"),
        SamplingSettings(bad_words=((1,),)),
    ):
        with pytest.raises(InvalidSettingError):
            model.attach(0, opening(sampling=sampling))


def test_a_pass_takes_its_time() -> None:
    spec = TargetSpec(pass_ms=20, token_ms=0.5, prompt_token_ms=0.1)
    model, clock = target(spec)
    model.attach(0, opening())
    model.attach(1, opening("t"))
    model.forward([Row(0, PROMPT[:4], 0, decide=False)])
    assert clock.now - 100.0 == pytest.approx(0.020 + 4 * 0.0001)
    before = clock.now
    # Slot 0: the prompt's last token decides, with two drafts. Slot 1: a whole prompt, the last of which decides.
    model.forward([Row(0, (PROMPT[4], 8, 9), 4, Proposal((8, 9), (0.5, 0.5))), Row(1, PROMPT, 0)])
    assert clock.now - before == pytest.approx(0.020 + 4 * 0.0005 + 4 * 0.0001)


def test_late_sleeps_are_made_good_and_late_work_is_not() -> None:
    clock = HandClock(slack=0.0002)
    pacer = Pacer(clock, clock.sleep, forgiven_s=0.0005)
    for _ in range(100):
        pacer.finish(clock.now, 0.003)
    assert clock.now - 100.0 == pytest.approx(100 * 0.003 + 0.0002)
    start = clock.now
    clock.now += 0.010  # the pass's own work took longer than the pass
    pacer.finish(start, 0.003)
    assert clock.now == start + 0.010
    clock.slack = 0.004  # far above what a timer does: only the forgiven part is made good
    pacer.finish(clock.now, 0.003)
    start, clock.slack = clock.now, 0.0
    pacer.finish(start, 0.003)
    assert clock.now - start == pytest.approx(0.003 - 0.0005)


def test_a_draft_expands_a_tree_and_keeps_what_came_true() -> None:
    spec = DraftSpec(step_ms=3, row_ms=0.5, prompt_token_ms=0.1, agreement=Agreement(acceptance=1.0, spread=0.0))
    model, clock = draft(spec, DraftSettings(tree=TreeSettings(branching=3)))
    truth = expected_tokens(PROMPT, 8, None, Language())
    model.open(opening())
    [root] = model.expand([Expand("s", ())])
    assert clock.now - 100.0 == pytest.approx(0.003 + 0.0005 + 4 * 0.0001)
    assert root.tokens[0] == truth[0]
    assert len(root.tokens) == len(root.confidences) == 3
    before = clock.now
    answers = model.expand([Expand("s", root.tokens[:1]), Expand("s", root.tokens[1:2])])
    assert clock.now - before == pytest.approx(0.003 + 2 * 0.0005)
    assert answers[0].tokens[0] == truth[1]
    assert [answer.path for answer in answers] == [root.tokens[:1], root.tokens[1:2]]
    model.expand([Expand("s", truth[:2])])
    assert len(model) == 3
    model.advance("s", truth[:1])
    assert len(model) == 1  # the dead sibling went with its level
    before = clock.now
    model.expand([Expand("s", truth[1:3])])  # two past the new root: its parent was run before the commit
    assert clock.now - before == pytest.approx(0.003 + 0.0005)
    # Commits beyond what was run are caught up by prefill: the root must be asked for again.
    model.advance("s", truth[1:6])
    with pytest.raises(EngineError, match="never expanded"):
        model.expand([Expand("s", truth[6:7])])
    before = clock.now
    [caught_up] = model.expand([Expand("s", ())])
    assert caught_up.tokens[0] == truth[6]
    # Run before: truth[:3]. Of truth[3:6] the last is the row itself.
    assert clock.now - before == pytest.approx(0.003 + 0.0005 + 2 * 0.0001)


def test_an_unreached_node_is_an_error() -> None:
    model, _ = draft()
    model.open(opening())
    with pytest.raises(EngineError, match="never expanded"):
        model.expand([Expand("s", (5,))])
    [root] = model.expand([Expand("s", ())])
    with pytest.raises(EngineError, match="never expanded"):
        model.expand([Expand("s", (root.tokens[0], 5))])
    with pytest.raises(EngineError, match="no session"):
        model.expand([Expand("t", ())])


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    model, clock = draft(DraftSpec(prompt_token_ms=0.1), DraftSettings(prefill_chunk=8))
    model.open(OpenSequence("long", tuple(range(20)), GREEDY, seed=0))
    assert model.expand([Expand("long", ())]) == []
    assert clock.now - 100.0 == pytest.approx(0.003 + 0.0008)
    assert model.expand([Expand("long", ())]) == []
    before = clock.now
    assert len(model.expand([Expand("long", ())])) == 1
    assert clock.now - before == pytest.approx(0.003 + 3 * 0.0001)


def test_draft_slots_are_bounded_and_given_back() -> None:
    model, _ = draft(settings=DraftSettings(slots=1))
    model.open(opening("a"))
    model.open(opening("a"))
    with pytest.raises(OverloadedError):
        model.open(opening("b"))
    model.close("a")
    model.close("never held")
    model.open(opening("b"))


def test_faults_happen_when_planned() -> None:
    faults = (Fault(kind="slow", at=1, factor=4.0, passes=2), Fault(kind="crash", at=4))
    model, clock = target(TargetSpec(pass_ms=10, faults=faults))
    times = []
    for _ in range(4):
        before = clock.now
        model.forward([])
        times.append(clock.now - before)
    assert times == pytest.approx([0.010, 0.040, 0.040, 0.010])
    for _ in range(2):
        with pytest.raises(EngineError, match="emulated crash"):
            model.forward([])
    model.faults.clear()
    model.forward([])


def test_a_hard_crash_ends_the_process() -> None:
    left: list[int] = []
    faults = Faults((Fault(kind="crash", at=0, hard=True),), leave=left.append)
    with pytest.raises(EngineError):
        faults.begin_pass()
    assert left == [70]


def test_a_frozen_engine_stands_still_until_thawed() -> None:
    faults = Faults()
    faults.freeze()
    passed = threading.Event()

    def run() -> None:
        faults.begin_pass()
        passed.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert not passed.is_set()
    faults.thaw()
    thread.join(10)
    assert passed.is_set()


def test_a_timed_freeze_ends_by_itself() -> None:
    faults = Faults((Fault(kind="freeze", at=0, seconds=0.001),))
    assert faults.begin_pass() == 1.0


def test_presets_follow_from_the_tables() -> None:
    # 70.6e9 parameters, 2 bytes each, on 4 GPUs of 3.35e12 B/s at 0.75; 80 layers of two all-reduces; a launch.
    base, token = preset_times("h100-70b")
    assert base == pytest.approx(1e3 * (141.2e9 / (4 * 3.35e12 * 0.75) + 160 * 12e-6 + 0.5e-3))
    assert token == pytest.approx(1e3 * (141.2e9 / (4 * 989e12 * 0.5)))
    assert preset_times("h100x8-70b")[0] < base
    one, _ = preset_times("a10-1b")
    assert one == pytest.approx(1e3 * (2.48e9 / (0.6e12 * 0.75) + 0.5e-3))
    assert len(preset_names()) == 1 + len(GPUS) * len(MODELS)
    for name in preset_names():
        assert target_spec(name).pass_ms > 0 < draft_spec(name).step_ms


def test_engine_kwargs_override_a_preset() -> None:
    spec = target_spec("emulated:h100-8b", {"pass_ms": 30, "language": {"vocabulary": 500}})
    assert (spec.pass_ms, spec.language.vocabulary) == (30, 500)
    assert spec.token_ms == preset_times("h100-8b")[1]
    assert draft_spec("emulated:reference", {"agreement": {"acceptance": 0.7}}).agreement.acceptance == 0.7


def test_what_cannot_be_emulated_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="h100"):
        target_spec("emulated:abacus-70b")
    with pytest.raises(ConfigError, match=r"engine_kwargs\.pass_s"):
        target_spec("emulated:reference", {"pass_s": 1})


def test_cards_of_a_pair_agree_and_of_strangers_differ() -> None:
    spoken = Language(vocabulary=1000, eos_probability=0.01)
    model, _ = target(TargetSpec(language=spoken))
    guesser, _ = draft(DraftSpec(language=spoken))
    stranger, _ = draft()
    assert model.card().fingerprint == guesser.card().fingerprint != stranger.card().fingerprint
    assert model.card().eos == (999,)


def test_alternatives_are_a_distribution_with_the_token_on_top() -> None:
    model, _ = target()
    model.attach(0, opening(sampling=SamplingSettings(temperature=0, logprobs=3, margins=True)))
    outcome = model.forward([Row(0, PROMPT, 0)])[0]
    assert outcome is not None
    [view] = outcome.alternatives
    assert view.top[0] == (outcome.tokens[0], view.logprob)
    assert len({token for token, _ in view.top}) == 3
    scores = [score for _, score in view.top]
    assert scores == sorted(scores, reverse=True)
    assert outcome.margins == (1.0,)
