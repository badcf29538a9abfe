"""Models with linear attention are refused by name where it is not computed."""

from __future__ import annotations

import pytest

from outrider.engine.cpu_kernels.paths import choose_kernels
from outrider.engine.host_memory import open_host_store
from outrider.engine.kv_cache.config import KVCacheConfig
from outrider.errors import ConfigError, ModelError
from outrider.model_hub.config import ModelConfig
from outrider.model_hub.load import load_model, read_config
from outrider.model_hub.pipeline import check_pipeline
from outrider.model_hub.support import check_config
from outrider.model_hub.tensor_parallel import check_tensor_parallel
from outrider.speculation.proposers.model_forward import open_draft_model
from tests.families.families import FAMILIES


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return FAMILIES["OLMo Hybrid"].make(tmp_path_factory.mktemp("hybrid"))


def test_only_native_kernels_on_a_cpu_compute_it(path):
    with pytest.raises(ModelError, match="OlmoHybridForCausalLM has linear attention, which only native kernels"):
        load_model(ModelConfig(id=str(path), kernels="torch"))
    with pytest.raises(ModelError, match="OlmoHybridForCausalLM has linear attention, which only CPUs compute"):
        check_config(read_config(path), "cuda:0")


def test_it_is_not_divided_among_processes(path):
    with pytest.raises(ConfigError, match="layers with linear attention"):
        check_tensor_parallel(ModelConfig(id=str(path), tensor_parallel_size=2), read_config(path))
    with pytest.raises(ConfigError, match="does not go with linear attention"):
        check_pipeline(ModelConfig(id=str(path), pipeline_parallel_size=2), path)


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
def test_a_model_with_states_is_no_draft_model(path):
    with pytest.raises(ConfigError, match="has linear attention"):
        open_draft_model(ModelConfig(id=str(path), num_threads=1), KVCacheConfig(num_blocks=128))


@pytest.mark.skipif(choose_kernels().library is None, reason="no native kernels were built")
def test_evicted_states_do_not_move_to_main_memory(path):
    model = load_model(ModelConfig(id=str(path), num_threads=1))
    with pytest.raises(ConfigError, match="does not go with linear attention"):
        open_host_store(model.make_cache(64, 16, (64,), 8), None, 1 << 20, max_rows=64)
