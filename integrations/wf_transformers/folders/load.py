"""Loads models from a folder, with their weights memory-mapped from its safetensors files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from wf_transformers.folders.shape import DTYPE, has_causal_model, load_config, refused_by_name
from wf_transformers.folders.skeleton import check_positions

OLD_BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Causal masks in GPT-2's files on the Hub; transformers 5.0 and 5.1 name them as unknown."""


def model_from_folder(
    folder: str | Path, torch_dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal language model whose weights are memory-mapped from files.

    The system reads pages when they are used and may drop them again, so host memory holds no
    second copy of the weights. Weights of another dtype than the model's are read and converted.
    Weights that transformers 5 merges or renames on loading, such as experts, are read.

    Args:
        folder: written by `save_pretrained`, with safetensors; or one of the Hub in this form.
        torch_dtype: of the model. None: that of the config; if it has none, that of the files, and
            if these have several, the one with the most bytes.

    Raises:
        ValueError: if safetensors files are missing, or weights are quantized, or tensors have
            other names or shapes than the model's parameters, or for another kind of model.
    """
    if not isinstance(torch_dtype, torch.dtype | None):
        raise ValueError(
            f"torch_dtype must be such as torch.bfloat16, or None, got {torch_dtype!r}"
        )
    files = _weight_files(Path(folder))
    config = _causal_config(folder)
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        raise ValueError(f"{folder} holds quantized weights, which are not split: {quantized}")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _mapped_tensors(file)
    dtype = torch_dtype or getattr(config, DTYPE) or _main_dtype(tensors)
    model = _load(config, tensors, dtype, folder)
    model.name_or_path = model.config.name_or_path = str(folder)
    if (Path(folder) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _causal_config(folder: str | Path) -> Any:
    config = load_config(folder)
    if not has_causal_model(config):
        raise ValueError(f"{folder} holds a {config.model_type}, which is no causal language model")
    return config


def _load(
    config: Any, tensors: dict[str, Tensor], dtype: torch.dtype | None, folder: str | Path
) -> PreTrainedModel:
    """The model with these weights, as transformers loads them: it copies none of `dtype`."""
    with torch.device("meta"):
        model_class: Any = type(AutoModelForCausalLM.from_config(config))
    refusal = f"{folder} does not hold a {model_class.__name__} as save_pretrained writes it: "
    try:
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            ignore_mismatched_sizes=True,  # they are in `info`, too
            output_loading_info=True,
            **{DTYPE: dtype},
        )
    except ValueError as error:  # for the names of another model, in transformers 4
        raise ValueError(f"{refusal}{error}") from error
    info["unexpected_keys"] = [x for x in info["unexpected_keys"] if not x.endswith(OLD_BUFFERS)]
    missing, unknown, mismatched = (
        sorted(info[f"{key}_keys"])[:3] for key in ("missing", "unexpected", "mismatched")
    )
    if missing or unknown:
        raise ValueError(f"{refusal}missing {missing}, unknown {unknown}")
    if mismatched:
        raise ValueError(
            f"{folder} does not hold what its config says: size mismatch for {mismatched}"
        )
    return model


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers would read; the folder may have others from earlier saves."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: download the model, and give the path to it")
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (single := folder / SAFE_WEIGHTS_NAME).exists():
        return [single]
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(
                f"{folder} has no *.safetensors files: write them with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
            )
        return files
    names = sorted({*json.loads(index.read_text()).get("weight_map", {}).values()})
    if not names:
        raise ValueError(f'{index} names no files: it must have a "weight_map"')
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(f"{folder} lacks {missing}, which {index.name} names")
    return [folder / name for name in names]


def _mapped_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name."""
    try:
        with safe_open(file, framework="pt") as reader:
            return {name: reader.get_tensor(name) for name in reader.keys()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _main_dtype(tensors: dict[str, Tensor]) -> torch.dtype | None:
    """The dtype of floating point with the most bytes."""
    sizes = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] += tensor.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)


@dataclass(frozen=True, slots=True)
class Generator:
    """A model and its tokenizer; `chat`: whether prompts are questions by its chat template."""

    model: PreTrainedModel
    tokenizer: Any
    chat: bool = False

    def generate_text(
        self,
        prompt: str,
        max_new_tokens: int,
        write: Callable[[str], None],
        on_host: bool,
        seed: int = 0,
        **options: Any,
    ) -> str:
        """Call `write` with the text of each new token, in order; returns the text that is left: a
        character at the end that lacks bytes.

        Args:
            on_host: whether the model's inputs are on the host, not on torch's accelerator.
            seed: for sampling.
            options: of transformers' `generate`, such as do_sample, temperature and top_p.
        """
        ids = self._ids(prompt)
        tokens = f"a prompt of {ids.numel()} tokens and --max-new-tokens {max_new_tokens}"
        check_positions(tokens, self.model, ids.numel() + max_new_tokens - 1)
        if not on_host:
            ids = ids.to(torch.accelerator.current_accelerator())
        torch.manual_seed(seed)
        writer = _Writer(self.tokenizer, write)
        self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            num_beams=1,  # the folder may say more, whose text is not known token by token
            num_return_sequences=1,
            streamer=writer,
            pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0,
            **options,
        )
        return writer.rest

    def _ids(self, prompt: str) -> Tensor:
        """(1, tokens) of a prompt, checked against the model's vocabulary."""
        text = self._question(prompt) if self.chat else prompt
        special = not self.chat  # a chat template has special tokens of its own
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=special).input_ids
        if not ids.numel():
            raise ValueError(f"the prompt must have a token at least, got {prompt!r}")
        embeddings: Any = self.model.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        if (largest := int(ids.max())) >= vocabulary:
            raise ValueError(
                f"the tokenizer is not the model's: the prompt has the token {largest}, and the "
                f"model has {vocabulary} tokens"
            )
        return ids

    def _question(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        with refused_by_name(self.tokenizer.name_or_path):  # templates raise errors of their own
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )


class _Writer(BaseStreamer):
    """Writes what each token adds to the text; `rest` is what was not written yet."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids: list[int] | None = None
        self.text = self.rest = ""

    def put(self, value: Tensor) -> None:
        if self.ids is None:  # the prompt
            self.ids = []
            return
        self.ids += value.flatten().tolist()
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        added, self.rest = text[len(self.text) :], ""
        if text.endswith("\ufffd"):  # the next tokens complete this character
            added, self.rest = "", added
        self.text += added
        self.write(added)

    def end(self) -> None:
        pass


def generator(folder: Path, chat: bool = False) -> Generator:
    """The model and tokenizer for `wallfacer generate`."""
    with refused_by_name(folder):
        _causal_config(folder)  # a tokenizer's error would not say what is wrong
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if chat and not tokenizer.chat_template:
            raise ValueError("its tokenizer has no chat template: leave --chat out")
        return Generator(model_from_folder(folder), tokenizer, chat)
