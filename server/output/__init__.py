"""From token ids to text, and to the parts of an answer. It never sees a wire format."""
