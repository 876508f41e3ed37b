"""`build_executor`: what computes the model that a config asks for, loaded.

Torch and what needs it is imported once the other ranks' processes have been started, which takes
them as long.
"""

from functools import partial
from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.executors.followers import Followers
from penstock.engine.models.fallback.source import TransformersClass
from penstock.engine.process.garbage import importing
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
    from penstock.engine.memory.pool.kv_memory import KVMemory, identity_of
    from penstock.engine.memory.tiers.offload import block_files, disk_tier
    from penstock.engine.sampling.grammar_table import load_grammars

    model = read_model(Path(config.model), config.model_impl)
    info = scripted_info(
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.max_model_len,
        block_size=config.block_size or 16,
        eos_token_ids=model.eos_token_ids,
        takes_images=config.takes_images and getattr(model, "is_wrapped", False),
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
    directory = Path(config.model)
    with phases.timed("import", "importing torch"), importing():
        from penstock.engine.hub.check import find_implementation
        from penstock.engine.loading.devices import choose_device
        from penstock.engine.loading.load import load_executor
        from penstock.engine.loading.ranks import build_ranks, check_parallel

        device = choose_device(config.device)
        implementation = find_implementation(directory, config.model_impl)
    if isinstance(implementation, TransformersClass):
        _refuse_ranks(layout, "a class of transformers computes this model, and it cannot be split")
    elif layout.size > 1:
        check_parallel(config, directory)
        assert followers is not None
        return build_ranks(config, phases, followers, on_gpus=device.has_kernels)
    return load_executor(config, directory, None, device, phases)


def _refuse_ranks(layout: RankLayout, why: str) -> None:
    """Raises InvalidConfig where there is more than one."""
    for flag, size in (
        ("--tensor-parallel-size", layout.tensor_size),
        ("--pipeline-parallel-size", layout.num_stages),
    ):
        if size > 1:
            raise InvalidConfig(f"{flag} {size}: {why}; leave it out, or serve another model")
