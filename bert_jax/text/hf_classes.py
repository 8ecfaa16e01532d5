# SPDX-License-Identifier: Apache-2.0
"""What the classes of transformers 5 make of a tokenizer.json: some follow the file, others build parts of it anew.

Source: `AutoTokenizer` and the tokenizer classes of transformers 5.23.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError, reading, shown
from bert_jax.text.bert_json import is_plain
from bert_jax.text.sentencepieces import BLANK, read_unigram
from bert_jax.text.tokenizer_files import FAIRSEQ, SPIECE, SPM, VOCAB, TokenizerFiles
from bert_jax.text.vocab import CONTINUATION, MAX_WORD_LENGTH, SPECIAL_TOKENS, JsonObject
from bert_jax.text.wordpiece import BERTS, GENERAL, INPUTS, LONGEST_WORD, is_lowercase

ROLES = ("pad", "unk", "cls", "sep", "mask")  # as SPECIAL_TOKENS
LONGEST = 100  # characters of a word, in the class of BERT
_BERT = "BertTokenizer"
_MPNET = "MPNetTokenizer"
_CAMEMBERT = "CamembertTokenizer"
_ALBERT = "AlbertTokenizer"
_DEBERTA = "DebertaV2Tokenizer"
_XLMR = "XLMRobertaTokenizer"
# The class of a model whose files name none. ModernBERT's follows the file, whatever class they name.
_OF_MODELS = {"bert": _BERT, "distilbert": _BERT, "electra": _BERT, "roberta": "RobertaTokenizer",
              "xlm-roberta": _XLMR, "camembert": _CAMEMBERT, "mpnet": _MPNET, "albert": _ALBERT, "nomic_bert": _BERT,
              "deberta-v2": _DEBERTA, **dict.fromkeys(("gte", "jina_embeddings_v3"), _XLMR)}  # fmt: skip
# Classes that compute without a tokenizer.json, some with programs for Japanese or Vietnamese.
_ELSEWHERE = ("BertJapaneseTokenizer", "BertweetTokenizer", "PhobertTokenizer", "CanineTokenizer",
              "FlaubertTokenizer", "XLMTokenizer", "BartphoTokenizer")  # fmt: skip
_MODELS = dict.fromkeys((*BERTS, _MPNET), "WordPiece") | {
    **dict.fromkeys(
        ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), "BPE"
    ),
    **dict.fromkeys((_XLMR, _CAMEMBERT, _ALBERT, _DEBERTA), "Unigram"),
}  # the classes that are computed as they are, and the model of each
# the file that each reads where there is no tokenizer.json
SOURCES = dict.fromkeys((*BERTS, _MPNET), VOCAB) | {
    _XLMR: FAIRSEQ,
    _CAMEMBERT: FAIRSEQ,
    _ALBERT: SPIECE,
    _DEBERTA: SPM,
}
# Classes of transformers that build parts anew, as is not done here. Those that it does not know follow the file.
_OTHERS = tuple(
    f"{name}Tokenizer"
    for name in (
        "Barthez", "BigBird", "Blenderbot", "CLIP", "CodeGen", "Cohere", "Deberta", "Funnel", "Gemma",
        "GPT2", "GPTNeoX", "Herbert", "LayoutLMv2", "LayoutLMv3", "LayoutXLM", "Llama", "MBart", "MBart50",
        "Nllb", "OpenAIGPT", "Pegasus", "Qwen2", "Reformer", "RemBert", "SeamlessM4T", "Splinter", "T5", "Udop",
        "Whisper", "XGLM", "XLNet",
    )
)  # fmt: skip
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which they are added
_NO_TYPES = ["input_ids", "attention_mask"]
_EXTRA = "extra_special_tokens"
_OLDER_EXTRA = "additional_special_tokens"
# our option: scores are numbers of Python's, as classes that build the model anew have them
EXACT = "exact_scores"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def class_of(files: TokenizerFiles, settings: JsonObject) -> str:
    """Returns the class that reads a directory's tokenizer, without "Fast"; "" for the one that follows tokenizer.json.

    Raises: InputError if that class computes what is not computed here.
    """
    config = files.model or {}
    model, named = (
        config.get("model_type"),
        settings.get("tokenizer_class") or config.get("tokenizer_class"),
    )
    name = str(named or "").removesuffix("Fast")
    if (
        name in _ELSEWHERE
        or settings.get("word_tokenizer_type")
        or settings.get("subword_tokenizer_type")
    ):
        what = name if name in _ELSEWHERE else _ELSEWHERE[0]
        raise InputError(
            f"{files.where} has a tokenizer of {what}, which splits text by other programs"
        )
    if model == "modernbert" or named in GENERAL:
        return ""
    if name in ("", "AutoTokenizer"):
        return _OF_MODELS.get(model, "") if isinstance(model, str) else ""
    return _BERT if name in BERTS and name != "DistilBertTokenizer" else name


def as_loaded(
    files: TokenizerFiles, backend: JsonObject, settings: JsonObject
) -> tuple[JsonObject, JsonObject, list[str]]:
    """Returns tokenizer.json and the settings beside it as transformers has them after loading, and notes for the user.

    Raises: InputError if the class that it takes cannot be computed here, or cannot read the file.
    """
    kind = class_of(files, settings)
    model = backend.get("model")
    directory = files.where
    notes: list[str] = []
    if not isinstance(model, dict):
        return backend, settings, []
    settings = _with_special(files, settings)
    plain = {token_of(settings, role) for role in _NAMED}
    wanted = _MODELS.get(kind)
    given = model.get("type")
    follow = "set tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast, which follows the file"
    if wanted and given not in (None, wanted):
        both = f"tokenizer.json has a {shown(given)} model, and {kind} makes a {wanted} of it"
        raise InputError(f"{directory}: {both}; {follow}")
    if kind in _OTHERS:
        raise InputError(
            f"{directory}: {kind} builds parts of tokenizer.json anew, which is not done here; {follow}"
        )
    lowercase = next(_normalizers(backend), {}).get("lowercase", True)
    if _MODELS.get(kind) == "WordPiece" and settings.get("do_lower_case") is None and not lowercase:
        notes.append(f"text is lower-cased, as transformers' {kind} does unless do_lower_case in "
                     "tokenizer_config.json is false, whatever tokenizer.json says")  # fmt: skip
    if kind in _MODELS:
        settings = settings | _usual_settings(kind, settings)
    elif settings.get("tokenizer_class") in GENERAL or files.model is not None:
        settings = {INPUTS: _NO_TYPES} | settings
    if wanted == "Unigram":
        settings = settings | {EXACT: True}
    with reading(str(directory)):
        backend = backend | {"added_tokens": _added_tokens(files, backend, settings, kind, plain)}
    # A vocab.txt of Google's keeps Google's limit.
    longest = model.get(LONGEST_WORD, MAX_WORD_LENGTH) if VOCAB in files.contents else LONGEST
    return backend | _parts(kind, backend, settings, longest), settings, notes


def _usual_settings(kind: str, settings: JsonObject) -> JsonObject:
    """Returns the special tokens that a class has, and the inputs, as its constructor completes the settings."""
    usual = dict(zip(ROLES, SPECIAL_TOKENS, strict=True))
    if kind not in BERTS:
        usual = {role: f"<{role}>" for role in ROLES} | {
            "bos": "<s>",
            "eos": "</s>",
            "cls": "<s>",
            "sep": "</s>",
        }
    if kind == _MPNET:
        usual["unk"] = "[UNK]"
    if kind in (_ALBERT, _DEBERTA):
        bert = dict(zip(ROLES, SPECIAL_TOKENS, strict=True)) | {"bos": "[CLS]", "eos": "[SEP]"}
        usual = bert | ({"unk": "<unk>", "pad": "<pad>"} if kind == _ALBERT else {})
    names = {
        f"{role}_token": settings.get(f"{role}_token") or token for role, token in usual.items()
    }
    if kind in (_MPNET, _CAMEMBERT) and isinstance(names["mask_token"], str):
        names["mask_token"] = {"content": names["mask_token"], "lstrip": True, "special": True}
    has_types = kind in (_BERT, _DEBERTA)
    return names if has_types else names | {INPUTS: settings.get(INPUTS, _NO_TYPES)}


def _with_special(files: TokenizerFiles, settings: JsonObject) -> JsonObject:
    """Returns the settings with special_tokens_map.json, read only where they have no tokens of their own."""
    return settings if "added_tokens_decoder" in settings else settings | files.special_tokens


def read_source(files: TokenizerFiles) -> tuple[JsonObject, JsonObject] | None:
    """Returns tokenizer.json and settings that a class makes of another file; None if it is BERT's vocab.txt alone."""
    kind = class_of(files, files.settings)
    source = SOURCES.get(kind, "")
    if source not in files.contents:
        return None
    if source != VOCAB:
        return _of_pieces(files, kind, files.where / source, files.contents[source])
    model = {
        "vocab": {token: index for index, token in enumerate(files.vocab)},
        LONGEST_WORD: LONGEST,
    }
    options = {"do_lower_case": is_lowercase(files.vocab, files.settings)} if kind in BERTS else {}
    backend, settings, _ = as_loaded(files, {"model": model}, files.settings | options)
    return None if is_plain(backend, files.where) else (backend, settings)


def _of_pieces(
    files: TokenizerFiles, kind: str, path: Path, content: bytes
) -> tuple[JsonObject, JsonObject]:
    """Returns tokenizer.json and settings that a class makes of a SentencePiece model. Raises: InputError."""
    with reading(str(path)):
        backend, tokens, is_bpe = read_unigram(content)
        if is_bpe and kind == _CAMEMBERT:
            raise InputError(
                f"it is a BPE, which {kind} computes otherwise than here; give a tokenizer.json"
            )
    model = backend["model"]
    settings = files.settings | {"unk_id": model["unk_id"]}
    if SOURCES[kind] == FAIRSEQ:
        names = _usual_settings(kind, _with_special(files, settings))
        model["vocab"] = _fairseqs(kind, model["vocab"], names)
    if not {_EXTRA, _OLDER_EXTRA} & settings.keys():
        settings[_EXTRA] = tokens
    backend, settings, _ = as_loaded(files, backend, settings)
    return backend, settings


def _fairseqs(kind: str, pieces: list[Any], settings: JsonObject) -> list[Any]:
    """Returns the pieces with fairseq's special tokens in place of those of the file."""
    bos, pad, eos, unk = (token_of(settings, role) for role in ("bos", "pad", "eos", "unk"))
    rest = pieces[3:]
    if kind == _CAMEMBERT:
        bos = "<s>NOTUSED"
        eos = "</s>NOTUSED"
        rest = [["<unk>NOTUSED", -100.0], *pieces[1:]]
    first = [[token, 0.0] for token in (bos, pad, eos, unk)]
    return [*first, *rest, [token_of(settings, "mask"), 0.0]]


def token_of(settings: JsonObject, role: str) -> str:
    """Returns the special token of a role, written with its options or without them; "" if none is named."""
    return _content(settings.get(f"{role}_token"))


def bert_parts(
    vocab: Any,
    lowercase: bool | None,
    strip_accents: bool | None,
    split_chinese: bool | None,
    longest: Any = LONGEST,
    unk: str = "[UNK]",
) -> JsonObject:
    """Returns BERT's parts of a tokenizer.json, but for its rows."""
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": split_chinese,
            "strip_accents": strip_accents,
            "lowercase": lowercase,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": CONTINUATION, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unk,
            "continuing_subword_prefix": CONTINUATION,
            LONGEST_WORD: longest,
            "vocab": vocab,
        },
    }


def make_rows(
    cls: str, sep: str, ids: Mapping[str, int], separators: int = 1, second_type: int = 1
) -> JsonObject:
    """Returns the post-processor of rows [CLS] A [SEP], and [CLS] A [SEP] .. B [SEP] with `separators` between."""
    first = [{"SpecialToken": {"id": cls, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = {"Sequence": {"id": "B", "type_id": second_type}}
    end, last = ({"SpecialToken": {"id": sep, "type_id": kind}} for kind in (0, second_type))
    return {
        "type": "TemplateProcessing",
        "single": [*first, end],
        "pair": [*first, *[end] * separators, second, last],
        "special_tokens": {
            token: {"id": token, "ids": [ids.get(token, 0)], "tokens": [token]}
            for token in (cls, sep)
        },
    }


def _parts(kind: str, backend: JsonObject, settings: JsonObject, longest: Any) -> JsonObject:
    """Returns the parts of tokenizer.json that a class builds anew."""
    model = backend["model"]
    wanted = _MODELS.get(kind)
    vocab = model.get("vocab")
    if not wanted:
        return {}
    ids = _ids_of(vocab) | {token["content"]: token["id"] for token in backend["added_tokens"]}
    if wanted == "WordPiece":
        lowercase = settings.get("do_lower_case")
        chinese = settings.get("tokenize_chinese_chars")
        parts = bert_parts(
            vocab,
            lowercase=True if lowercase is None else lowercase,
            strip_accents=settings.get("strip_accents"),
            split_chinese=True if chinese is None else chinese,
            longest=longest,
            unk=token_of(settings, "unk"),
        )
        # MPNet's pairs have two [SEP] between them, and no types.
        form = (2, 0) if kind == _MPNET else (1, 1)
        return parts | {
            "post_processor": make_rows(
                token_of(settings, "cls"), token_of(settings, "sep"), ids, *form
            )
        }
    if wanted == "BPE":
        blank = {"type": "ByteLevel", "add_prefix_space": bool(settings.get("add_prefix_space")),
                 "trim_offsets": True, "use_regex": True}  # fmt: skip
        return {
            "model": {"type": "BPE", "vocab": vocab, "merges": model.get("merges", [])},
            "normalizer": None,
            "pre_tokenizer": blank,
            "decoder": blank,
            "post_processor": make_rows(
                token_of(settings, "cls"), token_of(settings, "sep"), ids, 2, 0
            ),
        }
    unk = token_of(settings, "unk")
    is_berts = kind in (_ALBERT, _DEBERTA)
    unknown = {_CAMEMBERT: ids.get(unk, 0), _ALBERT: 1}.get(kind, 3)
    otherwise = "first" if kind == _DEBERTA else "never"
    scheme = "always" if settings.get("add_prefix_space", True) else otherwise
    blanks = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": scheme, "split": True}
    charsmaps = [part for part in _normalizers(backend) if part.get("type") == "Precompiled"][:1]
    splitters: list[JsonObject] = [{"type": "WhitespaceSplit"}]
    roles = ("cls", "sep") if is_berts else ("bos", "eos")
    cls, sep = (token_of(settings, role) for role in roles)
    rows = make_rows(cls, sep, ids, *((1, 1) if is_berts else (2, 0)))
    if kind == _ALBERT:
        charsmaps = [{"type": "Sequence", "normalizers": [*_alberts(settings), *charsmaps]}]
        rows = backend.get("post_processor") or rows
    if kind == _DEBERTA:
        piece = [unk, 0.0]
        unknown = vocab.index(piece) if piece in vocab else settings.get("unk_id", 1)
        charsmaps = [{"type": "Sequence", "normalizers": [*_debertas(settings)]}]
        split = {"type": "Punctuation", "behavior": "Isolated"}
        splitters = [split] if settings.get("split_by_punct") else []
    return {
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": False},
        "normalizer": charsmaps[0] if charsmaps else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitters, blanks]},
        "decoder": blanks,
        "post_processor": rows,
    }


def _debertas(settings: JsonObject) -> Iterator[JsonObject]:
    """Yields the normalizers of DeBERTa's class, which has no use for the table of the model file."""
    if settings.get("do_lower_case"):
        yield {"type": "Lowercase"}
    yield {"type": "Replace", "pattern": {"Regex": r"\s{2,}|[\n\r\t]"}, "content": " "}
    yield from ({"type": "NFC"}, {"type": "Strip", "strip_left": False, "strip_right": True})


def _alberts(settings: JsonObject) -> Iterator[JsonObject]:
    """Yields the normalizers that ALBERT's class puts before the table of the model file."""
    for quotes in ("``", "''"):
        yield {"type": "Replace", "pattern": {"String": quotes}, "content": '"'}
    if not settings.get("keep_accents"):
        yield from ({"type": "NFKD"}, {"type": "StripAccents"})
    if settings.get("do_lower_case", True):
        yield {"type": "Lowercase"}


def _ids_of(vocab: Any) -> dict[str, int]:
    """Returns the ids of a vocabulary, a map to them or a list of pieces with scores."""
    if isinstance(vocab, dict):
        return dict(vocab)
    return {piece[0]: index for index, piece in enumerate(vocab or ())}


def _normalizers(backend: JsonObject) -> Iterator[JsonObject]:
    """Yields the normalizer, or the members of a sequence of them."""
    part = backend.get("normalizer")
    members = (
        part.get("normalizers")
        if isinstance(part, dict) and part.get("type") == "Sequence"
        else [part]
    )
    yield from (member for member in members or () if isinstance(member, dict))


def _added_tokens(
    files: TokenizerFiles, backend: JsonObject, settings: JsonObject, kind: str, plain: set[str]
) -> list[JsonObject]:
    """Returns the tokens that are found in text, with their ids, as transformers adds them to the vocabulary.

    They stand in tokenizer.json, in added_tokens_decoder or else added_tokens.json, among the named special tokens,
    and in extra_special_tokens. `plain` are those that the files name, without what the class adds.
    """
    known = _ids_of(backend["model"].get("vocab"))
    own = backend.get("added_tokens") or []
    decoder = settings.get("added_tokens_decoder")
    extras = settings.get(_EXTRA) or settings.get(_OLDER_EXTRA) or ()
    if kind == _CAMEMBERT and not extras:
        extras = ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"]
    if decoder is None:
        plain = plain | {_content(token) for token in extras}
        written = {
            index: {"content": token, "normalized": token not in plain, "special": token in plain}
            for token, index in files.added_tokens.items()
        } | {token["id"]: token for token in own}
    else:
        written = {int(index): token for index, token in decoder.items()}
    added = {} if kind in _MODELS else {token["content"]: token for token in own}
    size = max([len(known), *(token["id"] + 1 for token in added.values())])

    def add(token: JsonObject, index: int | None = None) -> None:
        nonlocal size
        content = token["content"]
        if not isinstance(content, str):
            raise TypeError
        # A token that the vocabulary has keeps its id; any other gets the next one, so the order of
        # these calls is part of what transformers computes.
        given = added[content]["id"] if content in added else known.get(content, size)
        if index is not None and given != index:
            ids = f"the id {index}, and transformers gives it {given}"
            raise InputError(
                f"{files.where}: the added token {shown(content)} has {ids}; correct it in its file"
            )
        size = max(size, given + 1)
        added[content] = {
            "id": given,
            "content": content,
            **{flag: bool(token.get(flag)) for flag in _FLAGS},
        }

    # first those with ids, by these: transformers does so, whatever their order in the file
    for index in sorted(written):
        add(written[index], index)
    named = [settings.get(f"{role}_token") for role in _NAMED]
    others = [
        token
        for name, token in settings.items()
        if name.endswith("_token") and name[:-6] not in _NAMED
    ]
    listed = [*(extras.values() if isinstance(extras, dict) else extras)]
    for token in [*named, *others, *listed]:
        if _content(token) and _content(token) not in added:
            options = token if isinstance(token, dict) else {}
            is_special = token not in listed or options.get("special", True)
            content = {"content": _content(token), "special": is_special}
            add({"normalized": False, **options, **content})
    names: dict[int, str] = {}
    for name, index in [*known.items(), *((name, token["id"]) for name, token in added.items())]:
        if names.setdefault(index, name) != name:
            both = f"{shown(names[index])} and {shown(name)}"
            raise InputError(f"its files give {both} the same id, {index}; copy them again")
    return sorted(added.values(), key=lambda token: token["id"])


def _content(token: Any) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
