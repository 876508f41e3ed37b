"""`penstock chat`: a conversation with a served model in a terminal.

It speaks OpenAI's chat completions with any server, and imports nothing of the other folders of
the load generator.
"""
