"""`python -m tests.support.drafting_engine`: an engine process that verifies all drafts that it
finds, whatever they cost. So steps have drafts though there are many streams, and with scripted
tokens too. A request can end it as it can `troubled_engine`."""

from dataclasses import replace

from penstock.engine.config import EngineConfig
from penstock.engine.executors.scripted import ScriptedExecutor
from penstock.engine.ipc import process
from penstock.engine.loading.executor import build_executor
from penstock.engine.process.phases import Phases
from penstock.engine.step.executor import Executor
from tests.support.drafting import EveryDraft
from tests.support.troubled_engine import Troubled


def build(config: EngineConfig, phases: Phases) -> Executor:
    executor = build_executor(config, phases)
    if isinstance(executor, ScriptedExecutor):
        executor.info = replace(executor.info, takes_drafts=True)
    return Troubled(executor)


if __name__ == "__main__":
    process.Drafter = EveryDraft  # type: ignore[attr-defined]
    process.main(build)
