"""A node's adapters: loaded by settings, or on demand below a folder, and refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from outrider.engine.cpu_kernels.decoder import NativeDecoder
from outrider.errors import (
    AbortedError,
    AlreadyRunningError,
    CapacityError,
    ConfigError,
    InvalidRequestError,
    MismatchError,
    ModelError,
    NotAllowedError,
    NotFoundError,
)
from outrider.model_hub.adapters import AdapterTable
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.open import open_model
from outrider.request import Adapter
from tests.support.adapters import make_adapter
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base):
    model = open_model(ModelConfig(id=str(base), num_threads=1, keep_packed=False))
    if not isinstance(model.native, NativeDecoder):
        pytest.skip("no native kernels")
    return model


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        make_adapter(folder / name, base, seed=seed)
    make_adapter(folder / "dora", base, seed=0, config={"use_dora": True})
    return folder


def table_of(model, **settings):
    return AdapterTable(model, model_name="base", config=ModelConfig(**settings))


def test_adapters_of_the_settings_are_found_by_name_and_fingerprint(model, folder):
    table = table_of(model, adapters=(f"b={folder}/two", f"a={folder}/one"))
    assert [adapter.name for adapter in table.adapters] == ["a", "b"]
    one, two = table.adapters
    assert table.find(one) is not None
    assert table.find(one) is not table.find(two)
    assert table.find(Adapter("a", two.fingerprint)) is None
    with pytest.raises(NotAllowedError, match=r"set model\.adapter_directory"):
        table.load("c", "one")


def test_adapters_are_loaded_and_unloaded_on_demand(model, folder):
    table = table_of(model, adapter_directory=str(folder))
    one = table.load("a", "one")
    assert table.load("a", "one") == one
    assert table.adapters == (one,)
    with pytest.raises(AlreadyRunningError, match="another adapter has the name 'a'"):
        table.load("a", "two")
    with pytest.raises(AlreadyRunningError, match="the model has the name 'base'"):
        table.load("base", "two")
    packed = table.find(one)
    table.unload("a")
    assert table.find(one) is None
    assert packed.address, "those who use it keep it"
    with pytest.raises(NotFoundError, match="no adapter 'a'"):
        table.unload("a")
    assert table.load("a", "two") != one


def test_only_the_adapter_of_a_fingerprint_is_loaded_and_unloaded(model, folder):
    table = table_of(model, adapter_directory=str(folder))
    one, two = table.load("a", "one"), table.load("b", "two")
    table.unload("b", two.fingerprint)
    with pytest.raises(MismatchError, match=f"has the adapter .*{one.fingerprint[:12]}.*, not {two.fingerprint[:12]}"):
        table.load("b", "one", two.fingerprint)
    with pytest.raises(NotFoundError):
        table.unload("a", two.fingerprint)
    assert table.adapters == (one,)
    assert table.load("a", "one", one.fingerprint) == one


def test_a_call_that_has_ended_loads_nothing(model, folder):
    table = table_of(model, adapter_directory=str(folder))
    with pytest.raises(AbortedError, match="has ended"):
        table.load("a", "one", has_ended=lambda: True)
    assert table.adapters == ()


def test_adapters_of_the_settings_cannot_be_unloaded(model, folder):
    for settings in ({}, {"adapter_directory": str(folder)}):
        table = table_of(model, adapters=(f"a={folder}/one",), **settings)
        with pytest.raises(NotAllowedError, match=r"'a' cannot be unloaded .* one of model\.adapters") as caught:
            table.unload("a")
        assert caught.value.reason == "ADAPTERS_ARE_FIXED"
        with pytest.raises(NotFoundError):  # nothing keeps a cluster from unloading what this node does not have
            table.unload("b")
        assert len(table.adapters) == 1


def test_a_directory_may_be_absolute(model, folder):
    table = table_of(model, adapter_directory=str(folder))
    absolute = table.load("a", f"{folder}/one")
    assert table.load("b", "one").fingerprint == absolute.fingerprint


@pytest.mark.parametrize("directory", ["..", "", ".", "/", "/etc", "../adapters", "one/../.."])
def test_other_directories_are_not_allowed(model, folder, directory):
    with pytest.raises(NotAllowedError, match="not below"):
        table_of(model, adapter_directory=str(folder)).load("a", directory)


def test_a_link_out_of_the_folder_is_not_allowed(model, folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "one")
    with pytest.raises(NotAllowedError, match="not below"):
        table_of(model, adapter_directory=str(tmp_path)).load("a", "link")


def test_an_invalid_adapter_is_refused_without_the_nodes_paths(model, folder):
    table = table_of(model, adapter_directory=str(folder))
    for directory, why in (("dora", "'use_dora' True is not supported"), ("none", "No such file or directory")):
        with pytest.raises(InvalidRequestError, match=why) as caught:
            table.load("a", directory)
        assert str(folder) not in caught.value.message
    for name in ("", "x" * 129, "é", "a\n"):
        with pytest.raises(InvalidRequestError, match="name must have"):
            table.load(name, "one")
    assert table.adapters == ()


@pytest.mark.parametrize("directory", ["a\0b", "x" * 5000, "x/" * 5000, "loop", "loop/x", "one/adapter_config.json"])
def test_a_name_of_no_directory_is_refused(model, folder, directory):
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to("loop")
    with pytest.raises((InvalidRequestError, NotAllowedError)) as caught:
        table_of(model, adapter_directory=str(folder)).load("a", directory)
    assert str(folder) not in caught.value.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(model, folder, base, tmp_path, name):
    path = make_adapter(tmp_path / "root" / "one", base, seed=1) / name
    path.unlink()
    path.symlink_to(folder / "one" / name)
    with pytest.raises(InvalidRequestError, match=f"{name} is a link to a file that is not below"):
        table_of(model, adapter_directory=str(tmp_path / "root")).load("a", "one")
    assert table_of(model, adapters=(f"a={tmp_path}/root/one",)).adapters, "settings may name any file"


def num_bytes_of(model, folder):
    table = table_of(model, adapters=(f"a={folder}/one",))
    return table.find(table.adapters[0]).num_bytes


def test_adapters_may_not_take_more_memory_than_they_are_given(model, folder):
    num_bytes = num_bytes_of(model, folder)
    table = table_of(model, adapter_directory=str(folder), adapter_memory_bytes=2 * num_bytes - 1)
    one = table.load("a", "one")
    for _ in range(2):
        with pytest.raises(CapacityError, match=r"needs .* bytes, .*adapter_memory_bytes") as caught:
            table.load("b", "two")
        assert caught.value.reason == "ADAPTER_MEMORY"
    assert table.load("a", "one") == one, "what is loaded already needs no more"
    running = table.find(one)
    table.unload("a")
    with pytest.raises(CapacityError):
        table.load("b", "two")
    assert running.address
    del running
    assert table.load("b", "two")


def test_one_adapter_of_several_names_takes_memory_once(model, folder):
    table = table_of(model, adapter_directory=str(folder), adapter_memory_bytes=num_bytes_of(model, folder))
    found = [table.find(table.load(name, "one")) for name in "abc"]
    assert found[0] is found[1] is found[2]
    table.unload("a")
    assert table.find(table.load("a", "one")) is found[0]


def test_an_adapter_that_never_fits_is_refused(model, folder):
    with pytest.raises(InvalidRequestError, match=r"needs .* bytes, more than model\.adapter_memory_bytes") as caught:
        table_of(model, adapter_directory=str(folder), adapter_memory_bytes=1024).load("a", "one")
    assert caught.value.reason == "BAD_ADAPTER"
    with pytest.raises(ModelError, match=r"model\.adapter_memory_bytes"):
        table_of(model, adapters=(f"a={folder}/one",), adapter_memory_bytes=1024)
    both = (f"a={folder}/one", f"b={folder}/two")
    with pytest.raises(ConfigError, match=r"model\.adapter_memory_bytes"):
        table_of(model, adapters=both, adapter_memory_bytes=num_bytes_of(model, folder))


def test_memory_is_reserved_for_what_may_be_loaded(model, folder):
    num_bytes = num_bytes_of(model, folder)
    assert table_of(model).reserved_bytes == 0
    assert table_of(model, adapters=(f"a={folder}/one",)).reserved_bytes == 0, "it is loaded already"
    settings = {"adapter_directory": str(folder), "adapter_memory_bytes": 10 * num_bytes}
    assert table_of(model, **settings).reserved_bytes == 10 * num_bytes
    assert table_of(model, adapters=(f"a={folder}/one",), **settings).reserved_bytes == 9 * num_bytes


def test_invalid_settings_stop_the_start(model, folder, base, tmp_path):
    for adapters, why in (
        (("one",), "must be NAME=DIRECTORY"),
        ((f"a={folder}/one", f"a={folder}/two"), "two adapters of one name"),
    ):
        with pytest.raises(ConfigError, match=why):
            table_of(model, adapters=adapters)
    with pytest.raises(ModelError, match="use_dora"):
        table_of(model, adapters=(f"a={folder}/dora",))
    other = make_tiny_model(tmp_path / "other", overrides={"num_hidden_layers": 4})
    with pytest.raises(ModelError, match=r"does not fit base: .*model\.layers\.3\..*, which the model does not have"):
        table_of(model, adapters=(f"a={make_adapter(tmp_path / 'adapter', other, seed=0)}",))


def test_a_model_on_several_ranks_has_no_adapters(folder):
    model = SimpleNamespace(native=None)
    assert table_of(model, tensor_parallel_size=2).adapters == ()
    for settings in ({"adapters": (f"a={folder}/one",)}, {"adapter_directory": str(folder)}):
        with pytest.raises(ConfigError, match=r"not supported with model.tensor_parallel_size; unset model\.adapters"):
            table_of(model, tensor_parallel_size=2, **settings)
    with pytest.raises(NotAllowedError):
        table_of(model, tensor_parallel_size=2).load("a", "one")
    with pytest.raises(ConfigError, match=r"not supported with model.pipeline_parallel_size; unset model\.adapters"):
        table_of(model, pipeline_parallel_size=2, adapter_directory="/")
