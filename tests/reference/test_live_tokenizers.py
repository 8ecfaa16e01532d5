# SPDX-License-Identifier: Apache-2.0
"""transformers and ours on the tokenizers that a tokenizer.json describes, live, both ways."""

import gzip
import io
import json

import pytest
from described import LINES, write_described
from read_models import load_hf_tokenizer

from bert_jax import load_tokenizer
from bert_jax.batches.make import make_batch
from bert_jax.text.fitting import fit_texts
from bert_jax.text.hf_tokenizer import save_hf_tokenizer
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_json import learn_bytes
from tests.reference.make_tokenizer_goldens import fuzz_texts

transformers = pytest.importorskip("transformers")
sentencepiece = pytest.importorskip("sentencepiece")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

TEXTS = [*LINES[:12], "", " ", "\n\n", "a", "  a  b ", "don't can't we'll 1,234.5%", "Straße ÀÉÎ e\u0301 ﬁ ½ ①"]
TEXTS += ["東京都に住む", "ภาษาไทย", "한국어 텍스트", "Ελληνικά ΟΔΟΣ", "Русский текст", "עברית", "العربية", "हिन्दी"]
TEXTS += ["🙂👩\u200d👧 emoji", "\u200b\u00a0\ufeff\u2028x", "x" * 500, "CamelCaseWord snake_case 0x1F"]
TYPES = ["input_ids", "token_type_ids", "attention_mask"]


def theirs(directory):
    return transformers.AutoTokenizer.from_pretrained(directory)


def same(ours, other):
    for text in TEXTS:
        assert ours.encode(text) == other.encode(text, add_special_tokens=False), text
        mask = f"{text} {ours.template.specials[4]}."
        assert ours.encode(mask, True) == other.encode(mask, add_special_tokens=False), mask
    pairs = list(zip(TEXTS, TEXTS[3:]))
    ours_rows, their_rows = make_batch(ours, pairs, 1200), other(*zip(*pairs))
    for number, ids in enumerate(their_rows["input_ids"]):
        assert ours_rows.token_ids[number][: len(ids)].tolist() == ids
        if "token_type_ids" in their_rows:
            assert ours_rows.type_ids[number][: len(ids)].tolist() == their_rows["token_type_ids"][number]
        else:
            assert not ours_rows.type_ids[number].any()
    cut = other(*zip(*pairs), truncation=True, max_length=14)["input_ids"]
    assert [fitted.token_ids.tolist() for fitted in fit_texts(ours, pairs, 14)] == cut
    assert [ours.pad_id, ours.mask_id] == [other.pad_token_id, other.mask_token_id]
    assert ours.vocab_size == len(other)


KINDS = ["roberta", "modernbert", "xlmr", "words", "mpnet", "dnabert", "albert", "deberta", "llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_rows_and_the_way_back(tmp_path, kind):
    directory = write_described(tmp_path / "there", kind, **({"model_input_names": TYPES} if kind == "words" else {}))
    ours, notes = load_hf_tokenizer(directory)
    same(ours, theirs(directory))
    save_hf_tokenizer(tmp_path / "back", ours, 512)
    same(ours, theirs(tmp_path / "back"))
    theirs(tmp_path / "back").save_pretrained(tmp_path / "again")
    again, _ = load_hf_tokenizer(tmp_path / "again")
    same(again, theirs(tmp_path / "back"))
    assert not notes


CLASSES = {
    "roberta": ["RobertaTokenizer", "PreTrainedTokenizerFast", "BartTokenizerFast"],
    "xlmr": ["XLMRobertaTokenizer", "CamembertTokenizerFast", "PreTrainedTokenizerFast"],
    "modernbert": ["PreTrainedTokenizerFast", "RobertaTokenizer"],
    "mpnet": ["MPNetTokenizer", "MPNetTokenizerFast"],
    "albert": ["AlbertTokenizer", "AlbertTokenizerFast"],
    "deberta": ["DebertaV2Tokenizer", "DebertaV2TokenizerFast"],
    "words": ["BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer", "PreTrainedTokenizerFast"],
}


@pytest.mark.parametrize("settings", [
    {}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"extra_special_tokens": ["<e1>", "tow"]},
    {"do_lower_case": False}, {"do_lower_case": True, "split_by_punct": True}, {"model_input_names": TYPES},
])  # fmt: skip
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in CLASSES.items() for name in names])
def test_what_each_class_makes_of_the_files(tmp_path, kind, name, settings):
    models = {"xlmr": "xlm-roberta", "words": "bert", "deberta": "deberta-v2"}
    directory = write_described(tmp_path / "there", kind, **{"tokenizer_class": name} | settings)
    (directory / "config.json").write_text(json.dumps({"model_type": models.get(kind, kind)}))
    described = json.loads((directory / "tokenizer.json").read_text())
    if name != "PreTrainedTokenizerFast":  # parts that classes of their own do not keep
        described |= {"normalizer": {"type": "Lowercase"}} if kind == "roberta" else {}
        (directory / "tokenizer.json").write_text(json.dumps(described))
    same(load_hf_tokenizer(directory)[0], theirs(directory))
    same(load_tokenizer(directory), theirs(directory))


@pytest.mark.parametrize("kind", ["roberta", "modernbert", "xlmr", "words", "llama"])
def test_words_of_a_sentence(tmp_path, kind):
    """Training puts a blank before every word where that changes its tokens, and the export says so."""
    ours = load_hf_tokenizer(write_described(tmp_path / "there", kind))[0]
    words = ["low", "walker", ".", "東京", "The"]
    for each, folder in ((ours, "there"), (ours.with_blanks(), "back")):
        if folder == "back":
            save_hf_tokenizer(tmp_path / "back", each, 512)
        other = theirs(tmp_path / folder)(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
        assert [index for word in words for index in each.encode(word)] == other


@pytest.mark.parametrize("name", ["RobertaTokenizer", "XLMRobertaTokenizer", "CamembertTokenizer"])
def test_classes_of_their_own(tmp_path, name):
    kind = "roberta" if name == "RobertaTokenizer" else "xlmr"
    model = json.loads((write_described(tmp_path / "made", kind) / "tokenizer.json").read_text())["model"]
    rest = {"merges": [tuple(pair) for pair in model["merges"]]} if kind == "roberta" else {}
    vocab = model["vocab"] if kind == "roberta" else [tuple(each) for each in model["vocab"]]
    getattr(transformers, name)(vocab=vocab, **rest).save_pretrained(tmp_path / "there")
    ours, _ = load_hf_tokenizer(tmp_path / "there")
    same(ours, theirs(tmp_path / "there"))
    save_hf_tokenizer(tmp_path / "back", ours, 512)
    same(ours, theirs(tmp_path / "back"))


def test_what_build_vocab_learns(tmp_path):
    save_hf_tokenizer(tmp_path, Tokenizer(learn_bytes(LINES, 370, lowercase=True)), 512)
    same(load_tokenizer(tmp_path), theirs(tmp_path))


def shared_lines(folder) -> list[str]:
    """Returns prose in some forty languages, tweets, plays with brackets of every kind, and text out of sentences."""
    lines = []
    for pattern in ("udhr/*.txt", "wnut17/*", "bert_sample_text/*.txt", "wagahai_ja/*", "novels_de/*", "xquad/*.gz"):
        files = [file for file in sorted(folder.glob(pattern)) if file.name != "SOURCE.md"]
        assert files, f"no {pattern} at {folder}"
        for file in files:
            open_file = gzip.open if file.suffix == ".gz" else open
            with open_file(file, "rt", encoding="utf-8") as stream:
                if pattern.startswith("xquad"):
                    articles = json.load(stream)["data"]
                    lines += [block["context"] for article in articles for block in article["paragraphs"]]
                else:
                    lines += stream.read().split("\n")[:400]
    return lines


def odd_strings() -> list[str]:
    """Returns 2,000 strings of odd characters, without half ones, which the library does not take."""
    return [text.encode("utf-8", "ignore").decode() for text in fuzz_texts(2000)]


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.txt", "both"])
def test_mpnet_with_the_files_that_its_models_have(tmp_path, files):
    """Also where nothing but config.json says whose tokenizer it is; the way back, and strings of odd characters."""
    directory = write_described(tmp_path / "there", "mpnet")
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    if files != "tokenizer.json":
        (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(vocab, key=vocab.get)))
    if files == "vocab.txt":
        (directory / "tokenizer.json").unlink()
        (directory / "tokenizer_config.json").unlink()
    (directory / "config.json").write_text('{"model_type": "mpnet"}')
    ours, notes = load_hf_tokenizer(directory)
    same(ours, theirs(directory))
    assert not notes and (ours.cls_id, ours.pad_id, ours.sep_id, ours.unk_id) == (0, 1, 2, 4)
    assert ours.mask_id == ours.vocab_size - 1 and ours.template.separators == 2
    save_hf_tokenizer(tmp_path / "back", ours, 512)
    same(load_hf_tokenizer(tmp_path / "back")[0], theirs(tmp_path / "back"))
    strings = odd_strings()
    expected = theirs(directory)(strings, add_special_tokens=False)["input_ids"]
    for text, ids, again in zip(strings, expected, theirs(tmp_path / "back")(strings)["input_ids"], strict=True):
        assert ours.encode(text) == ids == again[1:-1], text


@pytest.mark.parametrize("kind", [*KINDS, "ours"])
def test_ids_on_the_shared_texts_and_odd_characters(tmp_path, shared_data, kind):
    lines = shared_lines(shared_data)
    learnt = lines[::7]  # the rest has words, characters and scripts that the vocabulary lacks
    lines += odd_strings()
    if kind == "ours":
        save_hf_tokenizer(tmp_path, Tokenizer(learn_bytes(learnt, 4000)), 512)
    else:
        write_described(tmp_path, kind, learnt, size=4000)
    ours, other = load_tokenizer(tmp_path), theirs(tmp_path)
    expected = other(lines, add_special_tokens=False)["input_ids"]
    assert sum(map(len, expected)) > 200_000
    different = [line for line, mine, ids in zip(lines, ours.encode_batch(lines), expected) if list(mine) != ids]
    assert not different, (len(different), different[:3])
    alone = lines[::97]
    assert [ours.encode(line) for line in alone] == other(alone, add_special_tokens=False)["input_ids"]


BERTS_PIECES = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
                "eos_piece": "[SEP]", "unk_piece": "[UNK]"}  # fmt: skip
ALBERTS_PIECES = {"pad_id": 0, "bos_id": -1, "eos_id": -1, "unk_id": 1, "pad_piece": "<pad>",
                  "control_symbols": ["[CLS]", "[SEP]", "[MASK]"], "user_defined_symbols": ["(", ")", "é"]}  # fmt: skip
MASK = {"added_tokens.json": {"[MASK]": 400}}
# what stands beside a model of SentencePiece's: its name, the model_type, options of the trainer, other files
PIECES = {
    "deberta": ("spm.model", "deberta-v2", BERTS_PIECES, {"tokenizer_config.json": {"vocab_type": "spm"}}),
    "deberta-added": ("spm.model", "deberta-v2", BERTS_PIECES, MASK),
    "deberta-odd": ("spm.model", "deberta-v2", BERTS_PIECES | {"unk_piece": "<unk>", "model_type": "bpe"}, {
        "tokenizer_config.json": {"do_lower_case": True, "split_by_punct": True, "add_prefix_space": False},
        "special_tokens_map.json": {"unk_token": "<unk>", "mask_token": {"content": "<m>", "lstrip": True}}}),
    "albert": ("spiece.model", "albert", ALBERTS_PIECES, {}),
    "albert-cased": ("spiece.model", "albert", ALBERTS_PIECES, {
        "tokenizer_config.json": {"do_lower_case": False, "keep_accents": True, "extra_special_tokens": ["low"]}}),
    "xlmr": ("sentencepiece.bpe.model", "xlm-roberta", {}, {}),
    "xlmr-named": ("sentencepiece.bpe.model", "xlm-roberta", {"user_defined_symbols": ["(", "é"]}, {
        "tokenizer_config.json": {"pad_token": "<p>", "mask_token": "<m>"}}),
    "camembert": ("sentencepiece.bpe.model", "camembert", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PIECES)
def test_a_model_of_sentencepiece_alone(tmp_path, kind):
    name, model, options, files = PIECES[kind]
    options = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2} | options
    content, lines = io.BytesIO(), [*LINES, *TEXTS, "．ＦＵＬＬ ｗｉｄｔｈ ﬁ ½"] * 3
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=content, **options)
    directory = tmp_path / "there"
    directory.mkdir()
    (directory / name).write_bytes(content.getvalue())
    size = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue()).get_piece_size()
    for each, inside in ({"config.json": {"model_type": model}} | files).items():
        inside = {"[MASK]": size} if each == "added_tokens.json" else inside
        (directory / each).write_text(json.dumps(inside))
    ours, notes = load_hf_tokenizer(directory)
    same(ours, theirs(directory))
    assert not notes
    save_hf_tokenizer(tmp_path / "back", ours, 512)
    (tmp_path / "back" / "config.json").write_text(json.dumps({"model_type": model}))
    same(ours, theirs(tmp_path / "back"))
    strings = odd_strings()
    plain = theirs(directory)(strings, add_special_tokens=False)["input_ids"]
    assert [list(ids) for ids in ours.encode_batch(strings)] == plain
    pairs = list(zip(strings, strings[1:]))
    for number, length in enumerate((7, 16, 33, 128)):
        some = pairs[number::40]
        cut = theirs(directory)(*zip(*some), truncation=True, max_length=length)["input_ids"]
        assert [fitted.token_ids.tolist() for fitted in fit_texts(ours, some, length)] == cut


@pytest.mark.parametrize("options", [{}, {"do_lower_case": False}, {"strip_accents": False}])
def test_a_bert_of_tokenizer_json_alone_on_odd_characters(tmp_path, repository, options):
    """Its characters are the library's, also those that Unicode 14 takes for others."""
    save_hf_tokenizer(tmp_path, load_tokenizer(repository / "tests" / "fixtures" / "tokenizer"), 64)
    (tmp_path / "vocab.txt").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"} | options))
    strings = odd_strings()
    expected = theirs(tmp_path)(strings, add_special_tokens=False)["input_ids"]
    assert load_tokenizer(tmp_path).encode_batch(strings) == expected
