"""From a Hugging Face directory (config, tokenizer, tensor names) to GGUF names and metadata, and back.

    describe_model(config, folder, names)     the model as GGUF has it: an `outline.Outline`
    architecture(folder)                      its architecture's name in GGUF
    float_layers(config, folder, modules)     which linear layers no GGUF of it has as codes

Read `outline` first, the result, then `family` and one module of families/: a family is a table of tensors, filled in
by `table`, with arguments from config.json (config/). tokenizer/ makes the vocabulary, towers/ the vision tower,
ollama/ a Modelfile. template/ makes the same Outline from a GGUF of the model instead, for any architecture;
`gguf_config` makes config.json of a GGUF's metadata.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bridge.errors import BridgeError, parameter
from bridge.models.config.arguments import Arguments, listed_layers, read_arguments
from bridge.models.config.gguf_keys import Key, typed
from bridge.models.config.model_config import Config
from bridge.models.config.provenance import read_provenance
from bridge.models.families import ALL
from bridge.models.family import HEAD, Family, float_names
from bridge.models.outline import Outline, OutlineTensor
from bridge.models.prediction import left_out, mtp_name, predicting_in, with_prediction, without_prediction
from bridge.models.sentence_transformers import DENSE, pooling_type
from bridge.models.table import fill_table, invert_table
from bridge.models.tokenizer.gguf_tokenizer import read_tokenizer
from bridge.models.tokenizer.special_tokens import stripping_name
from bridge.models.tokenizer.vocabulary import GGUFTokenizer
from bridge.models.wrapper import ANY_TEXT, has_parts, name_in_parts, renamed, text_config, text_names
from bridge.system.storage.files import read_json

__all__ = ["architecture", "describe_model", "float_layers", "numbers_of_gguf", "tensors_of_gguf"]


_OLD_PARTS = {"gamma": "weight", "beta": "bias"}  # of BERT's norms, before PyTorch


def architecture(folder: Path) -> str:
    """The GGUF architecture of a folder's config.json: "qwen3". Raises BridgeError if it is unknown."""
    path = Path(folder) / "config.json"
    return _family(Config(read_json(path), path))[0].arch


def float_layers(config: dict[str, Any], folder: Path, modules: Iterable[str]) -> set[str]:
    """The linear layers of a checkpoint's blocks that are floats in every GGUF of it, such as routers.

    They are those of its family's table, see `Row.floats`; of a family that is unknown, those of any.
    """
    try:
        families = [_family(Config(config, Path(folder) / "config.json"))[0]]
    except BridgeError:
        families = [*ALL]
    names = tuple(f".{name}" for family in families for name in float_names(family))
    return {module for module in modules if module.endswith(names)}


def describe_model(
    config: dict[str, Any], folder: Path, names: Mapping[str, Sequence[int]] | Collection[str], pre: str | None = None,
    no_mtp: bool = False, target: str | Path | None = None,
) -> Outline:  # fmt: skip
    """The outline of the GGUF that a checkpoint becomes.

    config  the parsed config.json
    folder  the Hugging Face directory, for tokenizer, generation config and model card
    names   every tensor as a float checkpoint names it, "<module>.weight" and "<module>.bias";
            a quantized module is listed by its weight too. If it maps to shapes, no count of the
            config may exceed them
    pre     overrides the recognition of tokenizer.ggml.pre
    no_mtp  whether layers that predict further tokens are left out, where llama.cpp has a place for them
    target  the folder of the model that a drafter guesses tokens for, where its own folder does not say all

    Raises:
        BridgeError: the architecture, a rule of the config or the tokenizer is unknown; a key or a
            tensor is missing; the family has no such tensor.
    """
    folder = Path(folder)
    family, note = _family(Config(config, folder / "config.json"))
    stored_names, others = text_names(names) if family.wrapped else ({name: name for name in names}, [])
    more: list[str] = []
    inner = family.usual(text_config(config) if family.wrapped else config)
    if family.starts:
        stored_names = {_with_start(name, family): stored for name, stored in stored_names.items()}
    if isinstance(layers_config := inner.get(family.nested), dict):
        inner = {**inner, **layers_config}
    if family.needs_target:  # its embeddings and head are in the file or not, each by itself
        inner = {**inner, "tie_word_embeddings": False}
    target_config = _target(family, folder, target)
    stored_names, names_note = _with_prefix(stored_names, family)
    pooling = pooling_type(folder)
    if headless := _headless(stored_names, family, inner, pooling is not None):
        inner = {**inner, "tie_word_embeddings": True}
    listed = listed_layers(Config(inner, folder / "config.json", names=family.names))
    layers, extra = inner.get("num_hidden_layers", len(listed or ()) or None), 0
    if family.predicts is not None and isinstance(layers, int):
        if family.predicts == "carried" and not no_mtp:
            stored_names, extra = with_prediction(stored_names, layers, family.mtp, family.block)
        else:
            stored_names, more = without_prediction(stored_names, layers)
    sides = {name: max(names[name], default=0) for name in stored_names.values()} if isinstance(names, Mapping) else {}
    if target_config is not None:  # whose embeddings and head a drafter may use
        sides[str(target_config.path)] = target_config.integer("vocab_size")
    longest = max(sides.items(), key=lambda side: side[1], default=None)
    values = Config(inner, folder / "config.json", longest, family.names, len(stored_names), target_config)
    for expected in family.expects:
        default = family.keys.get(expected.key, expected.values[0])
        unless = f" without {parameter('template')}, a GGUF of the same model" if expected.by_template else ""
        values.expect(expected.key, expected.values, default, expected.why, unless)
    args = replace(read_arguments(values, family.keys), predicting=extra)
    try:
        args = _with_more(args, family, values)
        more_keys: dict[str, Any] = {}
        for entry in family.metadata:
            more_keys |= entry.metadata(values, args)
        more_keys |= _groups(more_keys, values, args)
        family_keys = {key: None if value is None else typed(value) for key, value in more_keys.items()}
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        raise BridgeError(
            f"{values.path}: a key for {family.arch} has an unexpected value ({type(problem).__name__}: {problem}); "
            "take the config.json of the original model"
        ) from problem
    if args.rope.factors and not family.divided:
        raise BridgeError(
            f"{values.path}: rope of type {args.rope.type!r} divides frequencies; llama.cpp's graph for this "
            "architecture reads no divisors"
        )
    shapes = {name: names[stored] if isinstance(names, Mapping) else () for name, stored in stored_names.items()}
    outline = fill_table(family, args, shapes)
    renamed(outline, stored_names)
    tokenizer = _tokenizer(values, folder, pre, family)
    writer = gguf.GGUFWriter(None, family.arch)
    for tensor in outline.tensors:  # the writer counts parameters
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), 0)
    provenance, notes = read_provenance(values, folder, writer.get_total_parameter_count())
    provenance.name, strip_notes = stripping_name(tokenizer, provenance.name or "", family.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    provenance.set_gguf_meta_model(writer)
    args.add_metadata(writer, family.layer_norm, family.rotary)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    of_tokens = {key: family_keys.pop(key) for key in [*family_keys] if key.startswith("tokenizer.")}
    for key, value in family_keys.items():
        writer.kv_data[0].pop(f"{family.arch}.{key}", None)
        if value is not None:
            writer.kv_data[0][f"{family.arch}.{key}"] = value
    tokenizer.chat_templates |= family.templates(values)
    tokenizer.add_metadata(writer)
    writer.kv_data[0] |= {key: value for key, value in of_tokens.items() if value is not None}
    outline.metadata = writer.kv_data[0]
    if templates := outline.metadata.get(gguf.Keys.Tokenizer.CHAT_TEMPLATES):
        templates.value = sorted(templates.value)  # gguf makes it from a set, whose order differs between processes
    outline.others = others
    outline.stop = [tokenizer.tokens[token] for token in tokenizer.stop_ids]
    own_notes = family.notes(values) if family.notes is not None else []
    outline.notes = [*note, *names_note, *headless]
    outline.notes += [*left_out(more), *args.notes, *own_notes, *tokenizer.notes, *strip_notes, *notes]
    return outline


def _target(family: Family, folder: Path, target: str | Path | None) -> Config | None:
    """The config of the model that a drafter guesses for; BridgeError where it is missing, or of no use."""
    if target is None and family.needs_target:
        raise BridgeError(
            f"{folder}: is a drafter ({family.arch}), whose tokenizer is that of the model that it guesses for: name "
            f"that model's folder with {parameter('target_model', 'DIR')}"
        )
    if target is None:
        return None
    config = read_json(Path(target) / "config.json")
    if not family.needs_target:
        raise BridgeError(
            f"{parameter('target_model', target)}: {folder} is a {family.arch} model, which needs no other; leave it "
            "out"
        )
    return Config(text_config(config), Path(target) / "config.json")


def _tokenizer(values: Config, folder: Path, pre: str | None, family: Family) -> GGUFTokenizer:
    """The tokenizer of a model's folder, or of that of the model that it guesses for."""
    if values.target is not None:
        folder, family = values.target.path.parent, _family(values.target)[0]
        values = replace(values.target, values={**values.target.values, "vocab_size": values.integer("vocab_size")})
    generation = read_json(folder / "generation_config.json", optional=True)
    return read_tokenizer(values, folder, generation, pre, family.tokenizer)


def tensors_of_gguf(
    config: dict[str, Any], folder: Path, stored: Mapping[str, Sequence[int]], arch: str, family: Family | None = None,
    quantized: bool = False,
) -> list[OutlineTensor]:  # fmt: skip
    """How the tensors of a GGUF are made from a checkpoint's: what its family's table says, read the other way.

    config     the parsed config.json of `folder`
    stored     the GGUF's tensors: name -> shape; those that scale tensors of NVFP4 are left to the caller
    arch       its general.architecture
    family     None: the one that the config names
    quantized  whether the checkpoint will be, see `invert_table`

    With the config of a model of several parts, of which the GGUF has the language model, names are the whole model's.

    Raises BridgeError for an architecture that is unknown or not the GGUF's, and for tensors that do not match.
    """
    path = Path(folder) / "config.json"
    family = family or _family_of(arch, Config(config, path))
    longest = max(((name, max(shape)) for name, shape in stored.items()), key=lambda side: side[1])
    in_parts = family.wrapped and has_parts(config)
    if in_parts and family.of_parts:
        family = replace(family, alternative=family.of_parts, unstacked=True)
    inner = family.usual(text_config(config) if in_parts else config)
    values = Config(inner, path, longest, family.names, len(stored))
    args = read_arguments(values, family.keys)
    if family.predicts == "carried":
        args = replace(args, predicting=predicting_in(stored, args.layers))
    args = _with_more(args, family, values)
    outline = invert_table(family, args, stored, quantized)
    sources = {part.source for tensor in outline.tensors for part in tensor.parts}
    sources |= {part.times for tensor in outline.tensors for part in tensor.parts if part.times is not None}
    names = {name: mtp_name(name, args.layers, family.mtp) for name in sources}
    renamed(outline, {name: name_in_parts(inner, config) if in_parts else inner for name, inner in names.items()})
    tensors, known = [], {tensor.name for tensor in outline.tensors}
    for tensor in outline.tensors:
        if tensor.name in stored:
            if tuple(stored[tensor.name]) != tensor.shape:
                raise BridgeError(
                    f"{tensor.name}: is {list(stored[tensor.name])} in the GGUF, but {list(tensor.shape)} by {path}; "
                    "correct its sizes, or give the config.json of the GGUF's own model"
                )
            tensors.append(tensor)
        elif tensor.origin != "config" and not any(part.source in outline.optional for part in tensor.parts):
            raise BridgeError(
                f"{tensor.name}: is missing from the GGUF, but a model of {path} has it; give the config.json of the "
                "GGUF's own model"
            )
    scales = {f"{tensor.name.removesuffix('.weight')}.{key}" for tensor in tensors for key in ("scale", "input_scale")}
    if unknown := sorted(stored.keys() - known - scales):
        raise BridgeError(
            f"{unknown[0]}: the GGUF has it, a model of {path} does not; give the config.json of the GGUF's own model"
        )
    return tensors


def numbers_of_gguf(metadata: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that are numbers in a GGUF's metadata, float32 or int64, by name."""
    arch = metadata.get("general.architecture")
    families = [family for family in ALL if family.arch == arch]
    numbers = {
        name.format(layer): np.full(shape, value, np.float32)
        for family in families
        for key, (name, shape) in family.numbers.items()
        for layer, value in enumerate(metadata.get(key, ()))
    }
    return numbers | {
        name.format(layer): np.array(metadata[key], np.int64)
        for family in families
        for key, name in family.integers.items()
        for layer in metadata.get(family.integers_of, ())
    }


def _groups(keys: Mapping[str, Any], config: Config, args: Arguments) -> dict[str, int]:
    """Keys of one group of experts where all groups are chosen, which llama.cpp does not take: no group has an effect.

    Raises:
        BridgeError: llama.cpp cannot make the groups.
    """
    groups = keys.get("expert_group_count") or 1
    if groups == 1:
        return {}
    if groups >= args.experts or args.experts % groups:
        raise BridgeError(
            f"{config.path}: {args.experts} experts in {groups} groups; llama.cpp wants groups of two or more experts, "
            "all of one size"
        )
    all_chosen = keys.get("expert_group_used_count") == groups
    return {"expert_group_count": 1, "expert_group_used_count": 1} if all_chosen else {}


def _with_more(args: Arguments, family: Family, values: Config) -> Arguments:
    """The arguments with the sizes and factors that only this family has."""
    keys = [entry for entry in family.metadata if isinstance(entry, Key) and entry.defines]
    args = replace(args, more={key.defines: key.value(values) for key in keys})
    if family.sizes is not None:
        args = replace(args, more={**args.more, **family.sizes(values, args)})
    if family.layer_sizes is not None:
        args = replace(args, by_layer=family.layer_sizes(values, args))
    return args if family.factors is None else replace(args, factors=family.factors(values, args))


def _with_start(name: str, family: Family) -> str:
    """A name as the table has it: with the table's start, and today's names of a norm's parts; that of a weight with
    adapters (PyTorch's parametrizations) is the weight's."""
    start = next((start for start in family.starts if name.startswith(start)), "")
    name = family.starts.get(start, "") + name.removeprefix(start)
    name = name.replace(".parametrizations.weight.original", ".weight")
    module, _, part = name.rpartition(".")
    return f"{module}.{_OLD_PARTS[part]}" if part in _OLD_PARTS else name


def _with_prefix(stored_names: dict[str, str], family: Family) -> tuple[dict[str, str], list[str]]:
    """Names (-> the checkpoint's) with the start that the table's have, where none has it (in a bare family, each that
    lacks it), and a note."""
    prefix = f"{family.block.rpartition('.')[0]}."
    if prefix == ".":
        return stored_names, []
    embeddings = f"{family.table[0].source.removeprefix(prefix)}.weight"
    if not family.bare and (embeddings not in stored_names or any(name.startswith(prefix) for name in stored_names)):
        return stored_names, []
    known = (prefix, f"{HEAD.source}.", "mtp.", *(f"{folder}." for folder in DENSE))
    named = {name if name.startswith(known) else prefix + name: stored for name, stored in stored_names.items()}
    first = next((name for name in stored_names if not name.startswith(known)), None)
    if family.bare or first is None:
        return named, []
    return named, [f"the names of tensors lack {prefix!r}: {first} is read as {prefix}{first}"]


def _headless(stored_names: Collection[str], family: Family, config: dict[str, Any], pooled: bool) -> list[str]:
    """A note where the checkpoint is of a class of transformers without a head, LlamaModel, and has none, or where its
    states are pooled (Qwen3-Embedding)."""
    architectures = config.get("architectures")
    names = list(map(str, architectures)) if isinstance(architectures, list) else []
    named = bool(names) and (pooled or all(name.endswith("Model") for name in names))
    tied = config.get("tie_word_embeddings", family.keys.get("tie_word_embeddings", False))
    has_head = any(name.startswith(f"{HEAD.source}.") for name in stored_names)
    if not named or tied or has_head or not any(row.source == HEAD.source for row in family.table):
        return []
    return [f"{names[0]} has no output head: the embeddings take its place, as in llama.cpp"]


def _family(config: Config) -> tuple[Family, list[str]]:
    """The family of a model, or of the language model in one that may have any, and a note where `architectures` is
    not among its names."""
    architectures = config.get("architectures")
    inner = config.get("text_config", config.get("llm_config"))
    if isinstance(architectures, list) and isinstance(inner, dict) and not ANY_TEXT.isdisjoint(map(str, architectures)):
        family, note = _named(Config(inner, config.path))
        return replace(family, wrapped=True), note
    return _named(config)


def _family_of(arch: str, config: Config) -> Family:
    """The family of a config, or of the language model inside, whose architecture in GGUF must be `arch`."""
    family, _ = _family(config)
    inner = config.get("text_config")
    if family.arch != arch and isinstance(inner, dict):  # Mistral Small 3.1 was converted as a Llama
        fitting = (other for other in ALL if other.arch == arch and other.model_type == inner.get("model_type"))
        family = next((replace(other, wrapped=True) for other in fitting), family)
    if family.arch != arch:
        raise BridgeError(f"{config.path}: is of a {family.arch} model, but the GGUF's architecture is {arch}")
    return family


def _named(config: Config) -> tuple[Family, list[str]]:
    """The family that `architectures` names, or else model_type; with a note in the second case."""
    architectures, model_type = config.get("architectures") or [], config.get("model_type", "")
    architectures = architectures if isinstance(architectures, list) else [architectures]
    if not all(isinstance(name, str) for name in [*architectures, model_type]):
        raise BridgeError(
            f"{config.path}: architectures is {architectures!r:.80} and model_type {model_type!r:.80}, must be "
            "names; take the config.json of the original model"
        )
    names = [name for name in (*architectures, model_type) if name]
    for name in names:
        for family in ALL:
            if name in (*family.architectures, family.model_type) and family.chosen(config):
                if architectures and name == model_type:
                    unknown = ", ".join(architectures)
                    return family, [f"unknown architecture {unknown}: the model is read as its model_type, {name}"]
                return family, []
    if not names:
        raise BridgeError(f"{config.path}: has neither 'architectures' nor 'model_type'; one is needed")
    tool = "llama.cpp's `python convert_hf_to_gguf.py MODEL --outtype f16 --outfile model-f16.gguf`"
    unknown = " and model_type ".join(filter(None, (", ".join(architectures), model_type)))
    raise BridgeError(
        f"{config.path}: unknown architecture {unknown}; docs/checkpoints.md lists those that are known. Any other "
        "needs a GGUF of the same model, of any type: one from the Hub, "
        f"{parameter('template', 'OWNER/MODEL-GGUF')}, or {parameter('template', 'model-f16.gguf')} made by {tool} "
        "from the unquantized model"
    )
