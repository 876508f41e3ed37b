"""Function calling: how tools are put into the prompt, the grammars that enforce calls, and the
parsers that read them. It knows no HTTP."""
