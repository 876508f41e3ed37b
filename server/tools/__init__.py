"""Function calling: how tools are put into the prompt, the grammars that enforce calls, and the
parsers that read calls from an answer. It knows no HTTP and no tokenizer."""
