"""From wire fields to token ids: tokenizer, chat template, infill, sampling parameters. It never
sees an answer."""
