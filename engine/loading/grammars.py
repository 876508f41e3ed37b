"""The grammars of a start's executor."""

from pathlib import Path

from penstock.engine.config import EngineConfig
from penstock.engine.sampling.grammar import GrammarCompiler, Grammars
from penstock.engine.sampling.grammar_table import GrammarTable


def load_grammars(
    config: EngineConfig,
    model_dir: Path,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    *,
    samples: bool = True,
) -> GrammarTable:
    """samples: whether this rank does; the others need no tokenizer."""
    grammars = Grammars(GrammarCompiler(model_dir, vocab_size, eos_token_ids, config.load_format))
    if samples:
        grammars.load_tokenizer()
    return GrammarTable(grammars, config.scheduler.max_num_seqs, vocab_size)
