import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.support import WORDS, config, texts, tokenizer, write_jsonl
from tests.support import REPOSITORY
from titan_nemotron.data.tokenizer import Tokenizer, build_tokenizer, cached_tokenizer, train_tokenizer
from titan_nemotron.errors import UserError


@given(st.text(max_size=80))
@settings(max_examples=60)
def test_any_text_comes_back_and_its_bytes_are_counted(text: str) -> None:
    ids, sizes = tokenizer().encode_with_bytes(text)
    assert tokenizer().decode(ids.tolist()) == text
    assert ids.tolist() == tokenizer().encode([text])[0]
    assert sizes.sum() == len(text.encode())


def test_a_special_token_in_a_document_is_text() -> None:
    ids = tokenizer().encode(["a<|endoftext|>b"])[0]
    assert tokenizer().eos_id not in ids
    assert tokenizer().decode(ids) == "a<|endoftext|>b"


def test_training_gives_the_same_tokenizer_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes at once: one trains, all read the same; parallel and serial training agree."""
    code = (
        "import sys; from titan_nemotron.data.tokenizer import cached_tokenizer; from tests.data.support import texts;"
        "sys.stdout.write(cached_tokenizer(texts(300), 400).to_bytes().decode())"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert len(outputs) == 1
    assert outputs == {train_tokenizer(texts(300), 400).to_bytes().decode()}
    made = tmp_path / "titan_nemotron" / "tokenizers"
    assert [path.is_dir() for path in sorted(made.iterdir()) if path.suffix != ".lock"] == [True]
    assert cached_tokenizer(texts(300), 400).fingerprint == train_tokenizer(texts(300), 400).fingerprint
    assert cached_tokenizer(texts(200), 399).fingerprint == train_tokenizer(texts(200), 399).fingerprint


def test_trained_on_training_documents_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write_jsonl(tmp_path / "a.jsonl", texts(60))
    found = build_tokenizer(config(path, "jsonl", vocabulary_size=300))
    assert found.vocabulary_size == 300
    with pytest.raises(UserError, match="vocabulary_size = 5000: the documents give only"):
        build_tokenizer(config(path, "jsonl", vocabulary_size=5000))
    fewer = build_tokenizer(config(path, "jsonl", vocabulary_size=262, tokenizer_bytes=50))
    assert fewer.to_bytes() == train_tokenizer(texts(60)[:2], 262).to_bytes()


def test_an_unwritable_cache_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME"):
        cached_tokenizer(texts(50), 280)


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    first = Tokenizer(
        tokenizer().backend, tokenizer().eos_token, config={"chat_template": "{{ messages }}", "eos_token": "x"}
    )
    first.save(tmp_path / "a")
    second = Tokenizer.from_path(tmp_path / "a")
    assert second.to_bytes() == first.to_bytes()
    assert second.fingerprint == first.fingerprint
    assert second.config["chat_template"] == "{{ messages }}"
    assert Tokenizer.from_path(tmp_path / "a" / "tokenizer.json").eos_id == first.eos_id
    assert Tokenizer.from_bytes(first.to_bytes()).encode(["some text"]) == first.encode(["some text"])


def test_transformers_reads_what_we_save(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer().save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer().eos_id
    assert theirs(" ".join(WORDS))["input_ids"] == tokenizer().encode([" ".join(WORDS)])[0]


def hugging_face_directory(folder: Path, **config: object) -> Path:
    """A tokenizer that is not byte-level: words with a mark for the space before them, lower-cased, accents dropped."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "<s>", "<end>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("text", ["the Stream ends", "  naïve 😀 row\n", "", "ÀÉ", " "])
def test_bytes_of_a_tokenizer_with_normalisation(text: str, tmp_path: Path) -> None:
    found = Tokenizer.from_path(
        hugging_face_directory(tmp_path / "hf", eos_token={"content": "<end>"}, bos_token="<s>")
    )
    assert found.token_bytes is None
    assert (found.decode([found.eos_id]), found.bos_id) == ("<end>", 1)
    ids, sizes = found.encode_with_bytes(text)
    assert ids.tolist() == found.encode([text])[0]
    assert len(sizes) == len(ids)
    assert sizes.min(initial=0) >= 0
    if len(ids):
        assert sizes.sum() == len(text.encode())


def test_errors_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[data\] tokenizer = .*nowhere.*: no such file or directory"):
        Tokenizer.from_path(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"the directory has no tokenizer.json"):
        Tokenizer.from_path(tmp_path)
    with pytest.raises(UserError, match=r"\[data\] eos_token: .*does not say which token ends a document"):
        Tokenizer.from_path(hugging_face_directory(tmp_path / "hf"))
    with pytest.raises(UserError, match=r"\[data\] eos_token = '<other>': the tokenizer has no such token"):
        Tokenizer.from_path(tmp_path / "hf", eos_token="<other>")
    assert Tokenizer.from_path(tmp_path / "hf", eos_token="<end>").eos_token == "<end>"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizers file"):
        Tokenizer.from_path(tmp_path)
