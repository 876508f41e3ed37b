"""`build_executor`: what computes the model that a config asks for, loaded.

Torch and what needs it is imported once the other ranks' processes have been started, which takes
them as long.
"""

from functools import partial
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.executors.followers import Followers
from penstock.engine.models.fallback.source import TransformersClass
from penstock.engine.process.phases import Phases
from penstock.engine.ranks.layout import MAX_RANKS, RankLayout
from penstock.engine.step.executor import Executor
from penstock.scheduler.errors import InvalidConfig


def build_executor(config: EngineConfig, phases: Phases) -> Executor:
    """Raises PenstockError."""
    layout = RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size)
    if config.scripted:
        _refuse_ranks(layout, "the scripted engine has no model to split")
        return _scripted_executor(config)
    if not 1 < layout.size <= MAX_RANKS:
        return _model_executor(config, phases, layout, None)
    followers = Followers(layout)
    try:
        return _model_executor(config, phases, layout, followers)
    except BaseException:
        followers.close()
        raise


def _scripted_executor(config: EngineConfig) -> Executor:
    from penstock.engine.executors.scripted import ScriptedExecutor, scripted_info
    from penstock.engine.hub.check import read_model
    from penstock.engine.loading.grammars import load_grammars
    from penstock.engine.memory.pool.kv_memory import KVMemory, identity_of
    from penstock.engine.memory.tiers.offload import block_files, disk_tier

    model = read_model(Path(config.model), config.model_impl)
    info = scripted_info(
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.max_model_len,
        block_size=config.block_size or 16,
        eos_token_ids=model.eos_token_ids,
    )
    identity = identity_of(Path(config.model), info.block_size)
    files = block_files(config, identity)
    kept = None
    if config.kv_memory is not None:
        kept = KVMemory(config.kv_memory, identity, files.key if files else None)
    return ScriptedExecutor(
        info,
        grammars=load_grammars(config, Path(config.model), info.vocab_size, info.eos_token_ids),
        step_s=config.scripted_step_s,
        kept=kept,
        make_tier=partial(disk_tier, files) if files else None,
    )


def _model_executor(
    config: EngineConfig, phases: Phases, layout: RankLayout, followers: Followers | None
) -> Executor:
    """followers: those of further ranks, where there are any, and not too many."""
    model_dir = Path(config.model)
    with phases.timed("import", "importing torch"):
        from penstock.engine.executors.cpu import CpuExecutor
        from penstock.engine.hub.check import find_implementation
        from penstock.engine.loading.choices import choose_device

        is_on_gpu = choose_device(config.device).type == "cuda"
        implementation = find_implementation(model_dir, config.model_impl)
    if isinstance(implementation, TransformersClass):
        _refuse_ranks(layout, "a class of transformers computes this model, and it cannot be split")
        from penstock.engine.loading.fallback import load_fallback

        return CpuExecutor(load_fallback(config, model_dir, phases))
    if layout.size > 1:
        from penstock.engine.loading.cpu_ranks import build_parallel_executor, check_parallel

        check_parallel(config, model_dir)
        assert followers is not None
        if not is_on_gpu:
            return build_parallel_executor(config, phases, followers)
        from penstock.engine.loading.gpu_ranks import build_cuda_ranks

        return build_cuda_ranks(config, phases, followers)
    if is_on_gpu:
        from penstock.engine.loading.gpu import load_on_gpu

        return load_on_gpu(config, model_dir, phases=phases)
    from penstock.engine.loading.cpu import load_on_cpu
    from penstock.engine.loading.place import ALONE

    return CpuExecutor(load_on_cpu(config, model_dir, phases, ALONE))


def _refuse_ranks(layout: RankLayout, why: str) -> None:
    """Raises InvalidConfig where there is more than one."""
    for flag, size in (
        ("--tensor-parallel-size", layout.tensor_size),
        ("--pipeline-parallel-size", layout.num_stages),
    ):
        if size > 1:
            raise InvalidConfig(f"{flag} {size}: {why}; leave it out, or serve another model")
