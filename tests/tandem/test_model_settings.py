"""The settings of several models: what each may have of its own, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.errors import SettingsError
from tandem.model_settings import model_of, name_models, read_models, settings_of_models
from tandem.settings import Settings, load

TWO = {"small": {"model": "a", "decode": 2}, "large": {"model": "b", "kv_dtype": "int8", "served_model_name": "B,b"}}


def test_a_model_has_the_clusters_settings_and_its_own() -> None:
    """And a cluster of its own in the registry; it is known by its name in the file, unless it names others."""
    models = settings_of_models(load(models=TWO, redis="redis://r", cluster="prod", decode=3, http_port=1))
    small, large = models["small"], models["large"]
    assert (small.model, small.decode, small.kv_dtype, small.model_names) == ("a", 2, "auto", ("small",))
    assert (large.model, large.decode, large.kv_dtype, large.model_names) == ("b", 3, "int8", ("B", "b"))
    assert (small.cluster, large.cluster) == ("prod.small", "prod.large")
    assert small.redis == large.redis == "redis://r"
    assert not small.models
    assert small.host_workers == large.host_workers == 1 + 2 + 1 + 3  # the cores are shared by all
    assert [model_of(name) for name in ("prod", "prod.small")] == ["", "small"]


def test_one_model_is_the_cluster_itself() -> None:
    """Under an empty name."""
    settings = load(model="a")
    assert settings_of_models(settings) == {"": settings}


def test_settings_of_a_model_stay_what_they_were_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router may have another environment than the command that read the settings."""
    settings = load(models=TWO, decode=3)
    monkeypatch.setenv("TANDEM_DECODE", "7")
    monkeypatch.setenv("TANDEM_DTYPE", "bfloat16")
    large = settings_of_models(settings)["large"]
    assert (large.decode, large.dtype) == (3, "auto")


@pytest.mark.parametrize(
    ("models", "field"),
    [
        ({"small": {}}, "models.small.model"),
        ({"small": {"model": "a", "port": 1}}, "models.small.port"),
        ({"small": {"model": "a", "deocde": 1}}, "models.small.deocde"),
        ({"small": {"model": "a", "decode": -1}}, "models.small.decode"),
        ({"small": {"model": "a", "speculation": "draft"}}, "models.small.draft_model"),
        ({"small": {"model": "a", "prefill_max": 3}}, "models.small.autoscale"),
        ({"a": {"model": "a", "served_model_name": "x"}, "b": {"model": "b", "served_model_name": "x"}}, "models.b"),
        ({"a": {"model": "a"}, "b": {"model": "b", "served_model_name": "a"}}, "models.b"),
        ({"a": {"model": "a", "adapters": {"b": "f"}}, "b": {"model": "b"}}, "models.b"),
        ({"a": {"model": "a"}, "b": {"model": "b", "cluster": "a"}}, "models.b.cluster"),
        ({"a": {"model": "a", "cluster": "A"}}, "models.a.cluster"),
        ({"a": {"model": "a", "cluster": 5}}, "models.a.cluster"),
    ],
)
def test_what_a_model_cannot_have_is_refused_by_its_name(models: dict[str, dict[str, object]], field: str) -> None:
    """With the field as it is in the file."""
    with pytest.raises(SettingsError) as refused:
        settings_of_models(load(models=models))
    assert (refused.value.field or "").startswith(field)


@pytest.mark.parametrize("name", ["Big", "a/b", "a.b", "", "-a", "a" * 40])
def test_a_name_that_no_registry_key_or_worker_id_can_have_is_refused(name: str) -> None:
    """It is part of both."""
    with pytest.raises(SettingsError):
        load(models={name: {"model": "a"}})


def test_one_model_or_several_are_named_not_both_and_not_none() -> None:
    """Which of them would be served?"""
    for given in ({"model": "a", "models": TWO}, {}):
        with pytest.raises(SettingsError):
            load(**given)


def test_a_file_has_a_table_for_each_model(tmp_path: Path) -> None:
    """What is no such file is refused in one sentence."""
    file = tmp_path / "models.toml"
    file.write_text('[small]\nmodel = "a"\ndecode = 2\n')
    assert read_models(file) == {"small": {"model": "a", "decode": 2}}
    for text in ("", "model = 1", "[small"):
        file.write_text(text)
        with pytest.raises(SettingsError):
            read_models(file)
    with pytest.raises(SettingsError):
        read_models(tmp_path / "absent.toml")


def test_several_checkpoints_are_named_after_their_folders() -> None:
    """Two of one name are refused."""
    models = name_models(["Qwen/Qwen3-0.6B", "/models/SmolLM2_135M"])
    assert models == {
        "qwen3-0-6b": {"model": "Qwen/Qwen3-0.6B", "served_model_name": "Qwen/Qwen3-0.6B"},
        "smollm2-135m": {"model": "/models/SmolLM2_135M", "served_model_name": "SmolLM2_135M"},
    }
    settings_of_models(Settings(models=models))
    with pytest.raises(SettingsError):
        name_models(["/a/same", "/b/same"])


def test_the_environment_does_not_name_several_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong in it is refused in one sentence, by `load`."""
    monkeypatch.setenv("TANDEM_PREFILL", "two")
    monkeypatch.setenv("TANDEM_SERVED_MODEL_NAME", "x")
    models = name_models(["a", "b"])
    assert [own["served_model_name"] for own in models.values()] == ["a", "b"]
    with pytest.raises(SettingsError, match="prefill"):
        load(models=models)


def test_one_name_for_several_models_is_refused() -> None:
    """It is in the table of each model; the cluster's would have no effect."""
    with pytest.raises(SettingsError) as refused:
        settings_of_models(load(models=TWO, served_model_name="x"))
    assert refused.value.field == "served_model_name"
