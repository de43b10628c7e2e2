"""A checkpoint folder on disk: is it complete, and which weights are these?

Everything here is answered from the files before any weight is loaded, so that a bad path costs a second and one clear
sentence, not minutes and a stack trace.
"""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any, BinaryIO

import tokenizers
import xxhash

from tandem.checkpoint import ADAPTER_CONFIG, folder_of, hub_revision, read_json, vocabulary_digest, weight_files
from tandem.errors import CheckpointRefused

log = logging.getLogger(__name__)

WHOLE_FILE_LIMIT = 256 * 1024 * 1024  # bytes; of larger weight files, large tensors are sampled
WHOLE_TENSOR_LIMIT = 64 * 1024  # bytes; norms and biases, which may be all that a fine-tune changes
SAMPLE_BYTES, SAMPLE_EVERY, MIN_SAMPLES = 4096, 1024 * 1024, 4  # of a large tensor


def resolve(path: str) -> Path:
    """The local folder of a checkpoint: `path` itself if it is one, else the hub repository of that name.

    Raises CheckpointRefused when there is neither.
    """
    return folder_of(path) or _download(path)


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download  # only needed for hub ids, and slow to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

    name, revision = hub_revision(hub_id)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        if isinstance(error, HfHubHTTPError) and not isinstance(error, LocalEntryNotFoundError):
            raise CheckpointRefused(f"the hub refuses {hub_id}: {_first_line(error)}") from error
        raise CheckpointRefused(
            f"there is no folder {hub_id}, and the hub cannot be reached to download it; pass a checkpoint folder"
        ) from error
    except HFValidationError as error:
        raise CheckpointRefused(f"{hub_id} is neither a folder nor a hub id: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def check_folder(folder: Path) -> list[Path]:
    """The weight files of a complete checkpoint folder, sorted by name. Raises CheckpointRefused otherwise."""
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointRefused(f"{folder} has no config.json; pass the folder of a transformers checkpoint")
    told = read_json(config)
    if "model_type" not in told:
        raise CheckpointRefused(f"{config} names no model_type; it is not the config of a transformers model")
    files = weight_files(folder, told)
    for file in files:
        check_safetensors(file)
    if (folder / ADAPTER_CONFIG).is_file():
        log.warning("%s has %s: that adapter is not served", folder, ADAPTER_CONFIG)
    return files


def check_safetensors(file: Path) -> None:
    """Compares the length that the header promises with the file's. Raises CheckpointRefused if they differ.

    The format: 8 bytes little-endian header length, a JSON header with `data_offsets` of each tensor, the data
    (huggingface/safetensors, README).
    """
    try:
        actual = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > actual - 8:
                raise CheckpointRefused(f"{file} is cut off inside its header; download it again")
            header = json.loads(stream.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, ValueError, struct.error, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointRefused(f"{file} is not a readable safetensors file ({error}); download it again") from error
    promised = 8 + length + max(ends, default=0)
    if promised != actual:
        raise CheckpointRefused(f"{file} has {actual} bytes where its header promises {promised}; download it again")


def check_unused(files: list[Path], module: Any, unused: list[str]) -> None:
    """Warns of tensors that transformers leaves out. Raises CheckpointRefused for a bias among them whose layer has
    none by the config: the model that was trained computes with it. One of zeros changes nothing."""
    from safetensors import safe_open  # slow to import, and only needed where something is left over

    layers: dict[str, Any] = dict(module.named_modules())
    for name in unused:
        layer, _, last = name.rpartition(".")
        found = layers.get(layer, layers.get(f"{module.base_model_prefix}.{layer}"))
        if last != "bias" or getattr(found, "bias", module) is not None:
            continue
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                if name in tensors.keys() and tensors.get_tensor(name).any():  # noqa: SIM118 - not a dict
                    raise CheckpointRefused(
                        f"{file} has {name}, and by its config that layer has no bias: set what switches its biases on"
                        " in config.json (attention_bias, mlp_bias), or the model_type whose layer has one"
                    )
    if unused:
        log.warning("%s has %d tensors that its model does not take, such as %s", files[0], len(unused), unused[0])


def fingerprint(folder: Path, files: list[Path]) -> str:
    """32 hex digits (xxh3_128) that tell two pools whether they serve the same weights.

    Over config.json and, for each weight file in order, its name, length and content: all of it up to 256 MiB; beyond,
    the safetensors header, tensors of up to 64 KiB, and evenly spaced samples of 4 KiB of larger ones: one for each
    MiB, but at least 4. It detects different checkpoints and fine-tunes, whichever tensors these change, but no change
    between the samples, such as one row of an embedding, and it does not protect against deliberate collisions.
    """
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            if size <= WHOLE_FILE_LIMIT:
                while chunk := stream.read(1 << 22):
                    digest.update(chunk)
            else:
                _add_tensors(digest, stream)
    return digest.hexdigest()


def vocabulary_of(folder: Path) -> str:
    """The digest of its tokenizer's vocabulary, which routers compare with their own. Empty without a tokenizer.json,
    and for one that cannot be read: the routers that need it refuse it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        return vocabulary_digest(tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True))
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises nothing narrower
        log.warning("%s is not a readable tokenizer: %s", path, error)
        return ""


def _add_tensors(digest: xxhash.xxh3_128, stream: BinaryIO) -> None:
    """Adds the header of a safetensors file, its small tensors, and samples of its large ones."""
    (length,) = struct.unpack("<Q", stream.read(8))
    header = stream.read(length)
    digest.update(header)
    offsets = [tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__"]
    for begin, end in sorted(offsets):  # in the order of the file
        size = end - begin
        if size <= WHOLE_TENSOR_LIMIT:
            places, each = [0], size
        else:
            count, each = max(MIN_SAMPLES, size // SAMPLE_EVERY), SAMPLE_BYTES
            places = [(size - each) * sample // (count - 1) for sample in range(count)]
        for place in places:
            stream.seek(8 + length + begin + place)
            digest.update(stream.read(each))
