"""What comes up and what is refused: files, architectures, types and lengths, each by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.native.architecture import context_length, modelling_class
from engine.native.device import CPU_FLAGS, choose_device, choose_dtype, choose_threads, cpu_flags
from engine.native.engine import NativeEngine
from engine.native.errors import LaunchError, ModelFilesError, ModelRefusedError
from engine.native.loading import load, read_config
from engine.native.probe import probe_layout
from tests import tiny_models
from tests.native_requests import launch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


def copy(folder: Path, target: Path, **config_changes: Any) -> Path:
    """The checkpoint with its configuration changed; a value of None drops the field."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | config_changes
    kept = {name: value for name, value in config.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen3_next", "linear_attention"),
        ("mamba2", "linear_attention"),
        ("lfm3", "conv"),
        ("deepseek_v4", "compressed"),
        ("deepseek_v32", "indexed_attention"),
        ("llama4_text", "chunked_attention"),
        ("bart", "encoder-decoder"),
        ("rwkv", "state"),
        ("bloom", "replaceable attention"),
        ("clip", "no causal language model"),
    ],
)
def test_architectures_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ModelRefusedError, match=rf"'{model_type}'.*{reason}"):
        modelling_class(CONFIG_MAPPING[model_type]())


def test_a_model_that_only_its_logits_betray_is_refused(tmp_path: Path) -> None:
    """An encoder passes every look at its configuration, but its tokens see the ones behind them."""
    small: dict[str, Any] = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "initializer_range": 0.3,
    }
    config = CONFIG_MAPPING["bert"](**small)
    tiny_models.write_config(config, tmp_path)
    with pytest.raises(ModelRefusedError, match=r"'bert'.*two flattened requests are off"):
        NativeEngine(launch(tmp_path))


def test_a_layer_that_bypasses_attention_is_refused(llama: Path) -> None:
    class Bypass(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    config = read_config(llama)
    loaded = load(llama, config, "auto", CPU)
    loaded.model.model.layers[1].self_attn = Bypass()
    with pytest.raises(ModelRefusedError, match=r"'llama'.*layers \[1\] do not go through ordinary attention"):
        probe_layout(loaded, CPU)


def test_a_layer_that_hides_its_window_is_refused(tmp_path: Path) -> None:
    config = read_config(tiny_models.write("gemma3", tmp_path))
    loaded = load(tmp_path, config, "auto", CPU)
    loaded.model.model.layers[2].self_attn.sliding_window = None
    with pytest.raises(ModelRefusedError, match=r"layer 2 slides"):
        probe_layout(loaded, CPU)


def test_missing_files_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"nowhere' does not exist"):
        NativeEngine(launch(tmp_path / "nowhere"))
    with pytest.raises(ModelFilesError, match=r"has no config\.json"):
        NativeEngine(launch(tmp_path))
    folder = copy(llama, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"\x10" + b"\0" * 7 + b"not json at all!")
    with pytest.raises(ModelFilesError, match=r"weights in .* cannot be loaded"):
        NativeEngine(launch(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"has no \*\.safetensors file"):
        NativeEngine(launch(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"config\.json' cannot be used"):
        NativeEngine(launch(folder))


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        NativeEngine(launch(folder))


def test_unknown_code_in_the_folder_is_not_run(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "copy", model_type="own_model", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ModelFilesError, match=r"config\.json' cannot be used"):
        NativeEngine(launch(folder))


def test_auto_dtype_is_the_checkpoints_own_where_the_machine_multiplies_it(llama: Path, tmp_path: Path) -> None:
    half = tiny_models.write("llama", tmp_path / "half", dtype=torch.bfloat16)
    has_bf16 = bool(CPU_FLAGS[torch.bfloat16] & cpu_flags())
    assert NativeEngine(launch(half)).facts.dtype == ("bfloat16" if has_bf16 else "float32")
    assert NativeEngine(launch(llama)).facts.dtype == "float32"
    assert NativeEngine(launch(half, dtype="float32")).facts.dtype == "float32"
    silent = copy(half, tmp_path / "silent", dtype=None, torch_dtype=None)
    assert NativeEngine(launch(silent)).facts.dtype == ("bfloat16" if has_bf16 else "float32")


def test_half_types_are_computed_in_float32_on_a_plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.native.device.cpu_flags", lambda: frozenset({"avx2"}))
    assert choose_dtype("auto", torch.bfloat16, CPU) is torch.float32
    assert choose_dtype("auto", torch.float16, CPU) is torch.float32
    assert choose_dtype("bfloat16", torch.float32, CPU) is torch.bfloat16
    assert choose_dtype("auto", torch.bfloat16, torch.device("cuda")) is torch.bfloat16
    with pytest.raises(LaunchError, match="dtype 'int3'"):
        choose_dtype("int3", torch.float32, CPU)


def test_devices_that_are_not_here_are_refused() -> None:
    assert choose_device("cpu", rank=3) == CPU
    with pytest.raises(LaunchError, match="device 'tpu'"):
        choose_device("tpu", rank=0)


def test_ranks_share_the_cores() -> None:
    assert choose_threads(5, world=2) == 5
    assert choose_threads(0, world=10**6) == 1


def test_eos_ids_of_both_configs_count(llama: Path, tmp_path: Path) -> None:
    folder = copy(llama, tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert NativeEngine(launch(folder)).facts.eos_ids == (tiny_models.EOS, 7, 9)


def test_rope_that_depends_on_the_batch_bounds_the_context(llama: Path, tmp_path: Path) -> None:
    """Beyond the original length such frequencies follow the longest request of a batch."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
    config = read_config(copy(llama, tmp_path / "copy", rope_parameters=rope))
    assert context_length(config, 0) == 256
    assert context_length(config, 200) == 200
    with pytest.raises(LaunchError, match="max_model_len 300 is above 256"):
        context_length(config, 300)
