# SPDX-License-Identifier: Apache-2.0
"""Tokenizers that only a tokenizer.json describes, made with the library: as RoBERTa and its relatives have them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

STEMS = "low tow new flow want know walk talk sing call jump open".split()
LINES = [
    f"The {stem}{end} {other}s, {stem} isn't {number}.{number} (naïve Straße) 東京 é"
    for number, stem in enumerate(STEMS)
    for end in ("er", "ed", "ing")
    for other in STEMS[::3]
]
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
ALBERT = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|mask|>")
BERT = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def learn_bytes(made: Tokenizer, lines: Sequence[str], size: int, specials: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of bytes, which knows all of them."""
    options = {"special_tokens": [*specials], "initial_alphabet": ALPHABET, "show_progress": False}
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, **options))
    return made


def learn_unigram(
    lines: Sequence[str], size: int, normalizer: list, specials: Sequence[str], unk: str, by_blanks: bool = True
) -> Tokenizer:
    """Returns a tokenizer of a unigram model."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence(normalizer)
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*([pre_tokenizers.WhitespaceSplit()] if by_blanks else []), pre_tokenizers.Metaspace()]
    )
    made.decoder = decoders.Metaspace()
    options = {"special_tokens": [*specials], "unk_token": unk, "show_progress": False}
    made.train_from_iterator(lines, trainers.UnigramTrainer(vocab_size=size, **options))
    return made


def framed(made: Tokenizer, cls: str = "[CLS]", sep: str = "[SEP]", second: str = "$B:1 [SEP]:1") -> Tokenizer:
    """Returns the tokenizer, which puts special tokens around a text, and around a second one."""
    special = [(token, made.token_to_id(token)) for token in (cls, sep)]
    first = f"{cls} $A {sep}"
    made.post_processor = processors.TemplateProcessing(single=first, pair=f"{first} {second}", special_tokens=special)
    return made


def bytes_of_roberta(lines: Sequence[str] = LINES, size: int = 400) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learn_bytes(made, lines, size, ROBERTA)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


def bytes_of_modernbert(lines: Sequence[str] = LINES, size: int = 400) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learn_bytes(made, lines, size, ["|||IP|||", *BERT])
    made.normalizer = normalizers.NFC()
    return framed(made)


def bytes_of_llama(lines: Sequence[str] = LINES, size: int = 400) -> Tokenizer:
    """As EuroBERT has it: no token for what is not known, and the end of a text is padding, too."""
    made = Tokenizer(models.BPE(ignore_merges=True))
    words = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(split)
    learn_bytes(made, lines, size - 3, ())
    made.add_special_tokens([*LLAMA])  # behind the others
    begin, end, _ = LLAMA
    return framed(made, begin, end, f"$B {end}")


def letters_of_dnabert(lines: Sequence[str] = LINES, size: int = 200) -> Tokenizer:
    """BPE of characters, not of bytes, as DNABERT-2 has it."""
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=size, special_tokens=specials, show_progress=False))
    return framed(made)


def unigram_of_xlmr(lines: Sequence[str] = LINES, size: int = 120) -> Tokenizer:
    made = learn_unigram(lines, size, [normalizers.Nmt(), normalizers.NFKC()], ROBERTA, "<unk>")
    return framed(made, "<s>", "</s>", "</s> $B </s>")


def unigram_of_albert(lines: Sequence[str] = LINES, size: int = 120) -> Tokenizer:
    quotes = [normalizers.Replace(two, '"') for two in ("``", "''")]
    folds = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    return framed(learn_unigram(lines, size, [*quotes, *folds], ALBERT, "<unk>"))


def unigram_of_deberta(lines: Sequence[str] = LINES, size: int = 120) -> Tokenizer:
    """[MASK] comes after the pieces."""
    blanks = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    folds = [blanks, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    made = learn_unigram(lines, size, folds, ["[PAD]", "[CLS]", "[SEP]", "[UNK]"], "[UNK]", by_blanks=False)
    made.add_special_tokens(["[MASK]"])
    return framed(made)


def words(lines: Sequence[str] = LINES, size: int = 120) -> Tokenizer:
    """WordPiece, but not as BERT splits text."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    made.train_from_iterator(
        lines, trainers.WordPieceTrainer(vocab_size=size, special_tokens=[*BERT], show_progress=False)
    )
    return framed(made)


def words_of_mpnet(lines: Sequence[str] = LINES, size: int = 200) -> Tokenizer:
    """BERT's WordPiece with RoBERTa's ids: its special tokens first, and <mask> last."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size - 1, special_tokens=[*ROBERTA[:4], "[UNK]"], show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    vocab = made.get_vocab() | {"<mask>": made.get_vocab_size()}
    made.model, made.decoder = models.WordPiece(vocab, unk_token="[UNK]"), decoders.WordPiece()
    made.add_special_tokens([*ROBERTA])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


KINDS = {"roberta": bytes_of_roberta, "modernbert": bytes_of_modernbert, "xlmr": unigram_of_xlmr, "words": words,
         "mpnet": words_of_mpnet, "llama": bytes_of_llama, "dnabert": letters_of_dnabert,
         "albert": unigram_of_albert, "deberta": unigram_of_deberta}  # fmt: skip


def write_described(
    directory: Path, kind: str, lines: Sequence[str] = LINES, size: int | None = None, **settings: object
) -> Path:
    """Writes tokenizer.json and tokenizer_config.json as transformers names their contents."""
    directory.mkdir(parents=True, exist_ok=True)
    made = KINDS[kind](lines) if size is None else KINDS[kind](lines, size)
    names = ROBERTA if kind in ("roberta", "xlmr", "mpnet") else BERT
    roles = ("cls", "pad", "sep", "unk", "mask")
    names = ("[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]") if kind == "albert" else names
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | {f"{r}_token": n for r, n in zip(roles, names)}
    if kind == "llama":
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
        about |= dict(zip(("bos_token", "eos_token", "mask_token"), LLAMA)) | {"pad_token": LLAMA[1]}
    if kind == "mpnet":
        about |= {"unk_token": "[UNK]", "tokenizer_class": "MPNetTokenizer"}
    if kind in ("albert", "deberta"):
        about["tokenizer_class"] = {"albert": "AlbertTokenizer", "deberta": "DebertaV2Tokenizer"}[kind]
    if kind == "modernbert":
        about["model_input_names"] = ["input_ids", "attention_mask"]
    described = json.loads(made.to_str())
    for token in described["added_tokens"]:
        # as the released ones have it
        token["lstrip"] = token["content"] in ("<mask>", "[MASK]") and kind not in ("words", "deberta")
    (directory / "tokenizer.json").write_text(json.dumps(described))
    (directory / "tokenizer_config.json").write_text(json.dumps(about | settings))
    return directory
