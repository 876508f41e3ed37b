"""From token ids to text, and to the parts of an answer. It knows no prompt and no wire format."""
